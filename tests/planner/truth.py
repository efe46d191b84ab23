"""The peak of a step as it is: that of ``roomier bench planner``."""

from roomier.bench.planner_truth import measured_peak, measured_step

__all__ = ["measured_peak", "measured_step"]
