"""Callbacks: checkpoints, early stopping, averaging, progress display and measurements during a run."""

from typing import TYPE_CHECKING

from roomier.api.callback import Callback
from roomier.core.late_names import late_names

if TYPE_CHECKING:
    from roomier.callbacks.device_stats import DeviceStatsMonitor
    from roomier.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
    from roomier.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from roomier.callbacks.forecast import MemoryForecast
    from roomier.callbacks.gradient_accumulation import GradientAccumulationScheduler
    from roomier.callbacks.lambda_callback import LambdaCallback
    from roomier.callbacks.lr_monitor import LearningRateMonitor
    from roomier.callbacks.memory_anatomy import MemoryAnatomy
    from roomier.callbacks.model_checkpoint import ModelCheckpoint
    from roomier.callbacks.model_summary import ModelSummary
    from roomier.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from roomier.callbacks.prediction_writer import PredictionWriter
    from roomier.callbacks.progress import ProgressBar
    from roomier.callbacks.rich_model_summary import RichModelSummary
    from roomier.callbacks.spike_guard import SpikeGuard
    from roomier.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from roomier.callbacks.throughput import Throughput
    from roomier.callbacks.timer import Timer
    from roomier.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging
else:  # modules are imported on first access
    _HOMES = {
        "BackboneFinetuning": "finetuning",
        "BaseFinetuning": "finetuning",
        "DeviceStatsMonitor": "device_stats",
        "EMAWeightAveraging": "weight_averaging",
        "EarlyStopping": "early_stopping",
        "EarlyStoppingReason": "early_stopping",
        "GradientAccumulationScheduler": "gradient_accumulation",
        "LambdaCallback": "lambda_callback",
        "LearningRateMonitor": "lr_monitor",
        "MemoryAnatomy": "memory_anatomy",
        "MemoryForecast": "forecast",
        "ModelCheckpoint": "model_checkpoint",
        "ModelSummary": "model_summary",
        "OnExceptionCheckpoint": "on_exception_checkpoint",
        "PredictionWriter": "prediction_writer",
        "ProgressBar": "progress",
        "RichModelSummary": "rich_model_summary",
        "SpikeGuard": "spike_guard",
        "StochasticWeightAveraging": "stochastic_weight_averaging",
        "Throughput": "throughput",
        "Timer": "timer",
        "WeightAveraging": "weight_averaging",
    }
    __getattr__, __dir__ = late_names(__name__, _HOMES)

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EarlyStoppingReason",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "MemoryAnatomy",
    "MemoryForecast",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "RichModelSummary",
    "SpikeGuard",
    "StochasticWeightAveraging",
    "Throughput",
    "Timer",
    "WeightAveraging",
]
