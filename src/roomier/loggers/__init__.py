"""Loggers of metrics: the files ``metrics.jsonl`` and ``metrics.csv``, which every run writes by default, and
experiment trackers."""

from roomier.api.logger import Logger
from roomier.loggers.by_name import NeptuneLogger, loggers_from_flag
from roomier.loggers.comet import CometLogger
from roomier.loggers.files import CSVLogger, JSONLLogger
from roomier.loggers.group import LoggerGroup
from roomier.loggers.histogram import Histogram
from roomier.loggers.mlflow import MLFlowLogger
from roomier.loggers.tensorboard import TensorBoardLogger
from roomier.loggers.trackio import TrackioLogger
from roomier.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "CometLogger",
    "Histogram",
    "JSONLLogger",
    "Logger",
    "LoggerGroup",
    "MLFlowLogger",
    "NeptuneLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "loggers_from_flag",
]
