"""What is simulated: a run, the parts of its layers, and where each part's saved tensors wait."""
