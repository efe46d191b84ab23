"""Callbacks: saving, stopping early, and what a run tells about itself while it goes."""

from roomier.api.callback import Callback
from roomier.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from roomier.callbacks.forecast import MemoryForecast
from roomier.callbacks.lr_monitor import LearningRateMonitor
from roomier.callbacks.memory_anatomy import MemoryAnatomy
from roomier.callbacks.model_checkpoint import ModelCheckpoint
from roomier.callbacks.model_summary import ModelSummary
from roomier.callbacks.progress import ProgressBar
from roomier.callbacks.throughput import Throughput
from roomier.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "Callback",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EarlyStoppingReason",
    "LearningRateMonitor",
    "MemoryAnatomy",
    "MemoryForecast",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "Throughput",
    "WeightAveraging",
]
