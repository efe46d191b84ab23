"""Searches for the learning rate and the micro-batch size, which run on a copy of the model before a fit."""

from typing import TYPE_CHECKING

from roomier.core.late_names import late_names

if TYPE_CHECKING:
    from roomier.trainer.tuner.range_test import LearningRateCurve, lr_find
    from roomier.trainer.tuner.tuner import Tuner, scale_batch_size
else:  # imported when first used
    _HOMES = {
        "LearningRateCurve": "range_test",
        "Tuner": "tuner",
        "lr_find": "range_test",
        "scale_batch_size": "tuner",
    }
    __getattr__, __dir__ = late_names(__name__, _HOMES, "roomier.trainer.tuner")

__all__ = ["LearningRateCurve", "Tuner", "lr_find", "scale_batch_size"]
