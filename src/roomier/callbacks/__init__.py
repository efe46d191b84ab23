"""Callbacks: saving, stopping early, and what a run tells about itself while it goes."""

from roomier.api.callback import Callback
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
