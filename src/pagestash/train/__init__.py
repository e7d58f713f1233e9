"""Byte-level language modelling on text files: a decoder, a policy, a checkpoint."""

from pagestash.train.config import TrainConfig, parse_assignments, read_toml
from pagestash.train.loop import TrainResult, train
from pagestash.train.metrics import read_metrics
from pagestash.train.prepare import RunPlan as Plan
from pagestash.train.prepare import prepare

__all__ = [
    "Plan",
    "TrainConfig",
    "TrainResult",
    "parse_assignments",
    "prepare",
    "read_metrics",
    "read_toml",
    "train",
]
