"""Pipeline parallelism with `torch.distributed.pipelining`: plans of schedules, and layers placed by memory."""

from pagestash.pipeline.costs import LayerCost, read_costs
from pagestash.pipeline.early_free import Release, early_free
from pagestash.pipeline.overlapped import overlapped_schedule
from pagestash.pipeline.planned import PipelinePlan, RankPlan, plan_pipeline
from pagestash.pipeline.split_backward import delay_weight_gradients
from pagestash.pipeline.stages import Partition, Stage, partition
from pagestash.schedules.observe import Listener, Observation
from pagestash.schedules.plan import SCHEDULES, Action, Plan, in_flight, plans, read_plan

__all__ = [
    "SCHEDULES",
    "Action",
    "LayerCost",
    "Listener",
    "Observation",
    "Partition",
    "PipelinePlan",
    "Plan",
    "RankPlan",
    "Release",
    "Stage",
    "delay_weight_gradients",
    "early_free",
    "in_flight",
    "overlapped_schedule",
    "partition",
    "plan_pipeline",
    "plans",
    "read_costs",
    "read_plan",
]
