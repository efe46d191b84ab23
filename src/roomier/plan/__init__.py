"""The Plan: one frozen, validated value with all settings that affect the computation of a run. A Plan is created from
arguments, YAML or mappings. All parts of roomier read their settings from the Plan."""

from roomier.plan.choices import Kind
from roomier.plan.flags import plan_from_flags
from roomier.plan.parts import (
    ActivationPlan,
    AdapterPlan,
    AttentionPlan,
    BatchPlan,
    ChoicePlan,
    CompilePlan,
    LossPlan,
    OffloadPlan,
    OptimizerPlan,
    Options,
    ParallelPlan,
    PrecisionPlan,
)
from roomier.plan.plan import Difference, Plan
from roomier.plan.rules import CombinedPlanError

__all__ = [
    "ActivationPlan",
    "AdapterPlan",
    "AttentionPlan",
    "BatchPlan",
    "ChoicePlan",
    "CombinedPlanError",
    "CompilePlan",
    "Difference",
    "Kind",
    "LossPlan",
    "OffloadPlan",
    "OptimizerPlan",
    "Options",
    "ParallelPlan",
    "Plan",
    "PrecisionPlan",
    "plan_from_flags",
]
