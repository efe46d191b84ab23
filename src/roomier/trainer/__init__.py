"""The Trainer, with its arguments, the order of operations in one call, and Lightning's attributes."""

from roomier.trainer.trainer import Trainer

__all__ = ["Trainer"]
