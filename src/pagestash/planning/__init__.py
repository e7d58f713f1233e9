"""Plan a policy: measure or load a profile, predict policies, and choose the fastest that fits a budget."""

from pagestash.planning.make import plan, plan_profile, plan_stages
from pagestash.planning.predict import predict
from pagestash.planning.prediction import Prediction
from pagestash.planning.result import NothingFits, Plan, PlanRow
from pagestash.row_counts.distribution import RowDistribution
from pagestash.row_counts.pool import expected_rows_for, overflow_probability, pool_for
from pagestash.row_counts.tokens_per_expert import read_tokens_per_expert

__all__ = [
    "NothingFits",
    "Plan",
    "PlanRow",
    "Prediction",
    "RowDistribution",
    "expected_rows_for",
    "overflow_probability",
    "plan",
    "plan_profile",
    "plan_stages",
    "pool_for",
    "predict",
    "read_tokens_per_expert",
]
