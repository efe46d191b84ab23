"""Searches for the learning rate and the micro-batch size, which run on a copy of the model before a fit."""

from typing import TYPE_CHECKING

from roomier.core.late_names import late_names

if TYPE_CHECKING:
    from roomier.train.tuner.batch_size import scale_batch_size
    from roomier.train.tuner.curve import LearningRateCurve
    from roomier.train.tuner.range_test import lr_find
    from roomier.train.tuner.tuner import Tuner
else:  # imported when first used
    _HOMES = {
        "LearningRateCurve": "train.tuner.curve",
        "Tuner": "train.tuner.tuner",
        "lr_find": "train.tuner.range_test",
        "scale_batch_size": "train.tuner.batch_size",
    }
    __getattr__, __dir__ = late_names("roomier", _HOMES)

__all__ = ["LearningRateCurve", "Tuner", "lr_find", "scale_batch_size"]
