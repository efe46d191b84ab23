"""Callbacks: checkpoints, early stopping, averaging, progress display and measurements during a run."""

from typing import TYPE_CHECKING

from roomier.api.callback import Callback as Callback
from roomier.core.late_names import late_names

_HOMES = {  # modules are imported on first access
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "DeviceStatsMonitor": "device_stats",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "ElasticRanks": "elastic_ranks",
    "GradientAccumulationScheduler": "gradient_accumulation",
    "HistogramMonitor": "histogram_monitor",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "lr_monitor",
    "MemoryAnatomy": "memory_anatomy",
    "MemoryForecast": "forecast",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "OptunaPruning": "sweeps",
    "PeerSnapshots": "peer_snapshots",
    "PredictionWriter": "prediction_writer",
    "ProgressBar": "progress",
    "RayTuneReport": "sweeps",
    "RichModelSummary": "model_summary",
    "SpikeGuard": "spike_guard",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "StragglerMonitor": "straggler_monitor",
    "Throughput": "throughput",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}
__all__ = sorted(["Callback", *_HOMES])

if TYPE_CHECKING:
    from roomier.callbacks.device_stats import DeviceStatsMonitor as DeviceStatsMonitor
    from roomier.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from roomier.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from roomier.callbacks.elastic_ranks import ElasticRanks as ElasticRanks
    from roomier.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from roomier.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from roomier.callbacks.forecast import MemoryForecast as MemoryForecast
    from roomier.callbacks.gradient_accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from roomier.callbacks.histogram_monitor import HistogramMonitor as HistogramMonitor
    from roomier.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from roomier.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from roomier.callbacks.memory_anatomy import MemoryAnatomy as MemoryAnatomy
    from roomier.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from roomier.callbacks.model_summary import ModelSummary as ModelSummary
    from roomier.callbacks.model_summary import RichModelSummary as RichModelSummary
    from roomier.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from roomier.callbacks.peer_snapshots import PeerSnapshots as PeerSnapshots
    from roomier.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from roomier.callbacks.progress import ProgressBar as ProgressBar
    from roomier.callbacks.spike_guard import SpikeGuard as SpikeGuard
    from roomier.callbacks.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from roomier.callbacks.straggler_monitor import StragglerMonitor as StragglerMonitor
    from roomier.callbacks.sweeps import OptunaPruning as OptunaPruning
    from roomier.callbacks.sweeps import RayTuneReport as RayTuneReport
    from roomier.callbacks.throughput import Throughput as Throughput
    from roomier.callbacks.timer import Timer as Timer
    from roomier.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from roomier.callbacks.weight_averaging import WeightAveraging as WeightAveraging
else:
    __getattr__, __dir__ = late_names(__name__, _HOMES)
