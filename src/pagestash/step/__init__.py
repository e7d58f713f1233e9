"""One training step, eager or in a CUDA graph, with correct results even if the pool is too small."""
