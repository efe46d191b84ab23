"""Where the numbers of a run go: ``metrics.jsonl`` and ``metrics.csv`` in every run, TensorBoard by name."""

from roomier.api.logger import Logger
from roomier.loggers.by_name import loggers_from_flag
from roomier.loggers.csv import CSVLogger
from roomier.loggers.group import LoggerGroup
from roomier.loggers.jsonl import JSONLLogger
from roomier.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "JSONLLogger", "Logger", "LoggerGroup", "TensorBoardLogger", "loggers_from_flag"]
