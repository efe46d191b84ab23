"""Many kinds of model, each with one micro-batch: the models of ``roomier bench planner``."""

from roomier.bench.planner_models import DEPTH, LENGTH, MODELS, NUM_IMAGES, NUM_SEQUENCES, VOCABULARY

__all__ = ["DEPTH", "LENGTH", "MODELS", "NUM_IMAGES", "NUM_SEQUENCES", "VOCABULARY"]
