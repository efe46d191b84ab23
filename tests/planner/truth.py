"""The measured peak of a step, from ``python -m benchmarks planner``."""

from benchmarks.planner import measured_peak, measured_step

__all__ = ["measured_peak", "measured_step"]
