"""The Trainer: its arguments, the order of one call, and Lightning's attributes."""

from roomier.trainer.trainer import Trainer

__all__ = ["Trainer"]
