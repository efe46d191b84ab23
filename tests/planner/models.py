"""Many kinds of models, each with one micro-batch. ``python -m benchmarks planner`` uses these models."""

from benchmarks.planner_models import DEPTH, LENGTH, MODELS, NUM_IMAGES, NUM_SEQUENCES, VOCABULARY

__all__ = ["DEPTH", "LENGTH", "MODELS", "NUM_IMAGES", "NUM_SEQUENCES", "VOCABULARY"]
