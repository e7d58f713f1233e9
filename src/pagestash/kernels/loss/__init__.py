"""Kernels of the language model's loss, which never holds all logits."""
