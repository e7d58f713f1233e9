"""Hugging Face in three lines: `pagestash.integrations.hf` under a short name."""

from pagestash.integrations.hf import Report, optimize

__all__ = ["Report", "optimize"]
