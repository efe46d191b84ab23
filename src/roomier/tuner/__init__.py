"""What is tried on a copy before a fit: the learning rate, and how many samples a micro-batch may have."""

from roomier.tuner.batch_size import scale_batch_size
from roomier.tuner.curve import LearningRateCurve
from roomier.tuner.lr_find import lr_find
from roomier.tuner.tuner import Tuner

__all__ = ["LearningRateCurve", "Tuner", "lr_find", "scale_batch_size"]
