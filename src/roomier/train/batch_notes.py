"""Notes on an error that came up in a step: which batches it was, and what they hold that no model can compute with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roomier.core.errors import RoomierError, TrainingError, shorten
from roomier.core.tree import tensors
from roomier.core.world import World
from roomier.run.progress import Window


def note_batches(error: Exception, window: Window, world: World) -> None:
    """Note on ``error`` of a training step which rank and batches it was, where that matters, and what they show."""
    if world.size > 1 or (isinstance(error, TrainingError) and error.field == "num_loss_terms"):
        first, last = window.first_batch, window.first_batch + len(window.batches) - 1
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        on_rank = f" on rank {world.rank}" if world.size > 1 else ""
        error.add_note(f"the step{on_rank} was on {batches} of epoch {window.epoch}")
    note_text(error, window.batches[0], "train_dataloaders")


def note_text(error: Exception, batch: Any, name: str) -> None:
    """Note on ``error`` that ``batch`` holds text and no tensor.

    Args:
        name: what the user calls the loader.
    """
    is_text = any(isinstance(leaf, (str, bytes)) for leaf in _leaves(batch)) and next(tensors(batch), None) is None
    if is_text and not isinstance(error, RoomierError):
        action = "Turn the text into tensors in the data set or in collate_fn, with a tokenizer"
        error.add_note(f"{name}={shorten(batch)}: the batch holds text and no tensor. {action}")


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, (list, tuple, Mapping)):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _leaves(each)
    else:
        yield batch
