"""Plan a policy: measure or load a profile, predict policies, and choose the fastest that fits a budget."""

from pagestash.planning.make import plan, plan_profile
from pagestash.planning.predict import Prediction, predict
from pagestash.planning.result import NothingFits, Plan, PlanRow

__all__ = ["NothingFits", "Plan", "PlanRow", "Prediction", "plan", "plan_profile", "predict"]
