"""The Trainer, with its arguments, the order of operations in one call, and Lightning's attributes."""

from roomier.trainer.lightning.checkpoints import let_lightning_read_folders
from roomier.trainer.trainer import Trainer

let_lightning_read_folders()  # a script can load a checkpoint before it creates a Trainer

__all__ = ["Trainer"]
