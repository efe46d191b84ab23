"""Notes that are added to an error in a step. A note names the rank, the batches, and invalid contents of the
batches."""

from __future__ import annotations

from typing import Any

from roomier.core.errors import RoomierError, TrainingError, shorten
from roomier.core.tree import leaves, tensors
from roomier.core.world import World
from roomier.run.progress import WindowBatches


def note_batches(error: Exception, window: WindowBatches, world: World) -> None:
    """Add a note to the ``error`` of a training step if there are several ranks or ``num_loss_terms`` failed. The note
    names the batches of the step and, with several ranks, the rank.

    :func:`note_text` can add another note about the first batch.
    """
    if world.size > 1 or (isinstance(error, TrainingError) and error.field == "num_loss_terms"):
        first, last = window.first_batch, window.first_batch + len(window.batches) - 1
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        on_rank = f" on rank {world.rank}" if world.size > 1 else ""
        error.add_note(f"the step{on_rank} used {batches} of epoch {window.epoch}")
    note_text(error, window.batches[0], "train_dataloaders")


def note_text(error: Exception, batch: Any, name: str) -> None:
    """Add a note to ``error`` if ``batch`` contains text and no tensor, unless ``error`` is a RoomierError.

    Args:
        name: name of the user's argument that contains the loader, for the message.
    """
    is_text = any(isinstance(leaf, (str, bytes)) for leaf in leaves(batch)) and next(tensors(batch), None) is None
    if is_text and not isinstance(error, RoomierError):
        action = "Convert the text to tensors in the dataset or in collate_fn, with a tokenizer"
        error.add_note(f"{name}={shorten(batch)}: the batch contains text and no tensor. {action}")
