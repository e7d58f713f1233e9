"""Hugging Face in three lines: `pagestash.integrations.hf` under a short name."""

from pagestash.integrations.hf import Report, optimize, unwrap, wrap

__all__ = ["Report", "optimize", "unwrap", "wrap"]
