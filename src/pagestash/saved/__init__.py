"""Saved tensors: the hook that sees them, their identity, their homes, and the keeper that applies a policy."""
