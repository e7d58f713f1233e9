"""Hugging Face in three lines: `pagestash.integrations.hf` under a short name."""

from pagestash.integrations.hf import OverCapacity, Report, expert_parallel, optimize, unwrap, wrap

__all__ = ["OverCapacity", "Report", "expert_parallel", "optimize", "unwrap", "wrap"]
