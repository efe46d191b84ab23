"""The measured peak of a step, from ``roomier bench planner``."""

from roomier.bench.planner_truth import measured_peak, measured_step

__all__ = ["measured_peak", "measured_step"]
