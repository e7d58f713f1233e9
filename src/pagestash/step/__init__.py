"""One training step, eager or in a CUDA graph, that stays correct when the pool is too small."""
