"""Many kinds of models, each with one micro-batch. ``roomier bench planner`` uses these models."""

from roomier.bench.planner_models import DEPTH, LENGTH, MODELS, NUM_IMAGES, NUM_SEQUENCES, VOCABULARY

__all__ = ["DEPTH", "LENGTH", "MODELS", "NUM_IMAGES", "NUM_SEQUENCES", "VOCABULARY"]
