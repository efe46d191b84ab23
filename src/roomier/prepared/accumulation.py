"""Position of a custom loop between two optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roomier.prepared.loader import PreparedLoader


@dataclass
class Accumulation:
    """State that the prepared model, optimizers, schedulers and loaders of one Accelerator share.

    Attributes:
        num_steps: number of micro-batches per optimizer step.
        ends_with_loader: whether the last batch of a loader always ends the accumulation.
        is_syncing: whether the current micro-batch is the last micro-batch of an optimizer step.
        index: number of micro-batches since the start, or since the last batch of a loader ended an accumulation.
        loaders: loaders that are being read. The last loader in the list is the innermost loader.
    """

    num_steps: int = 1
    ends_with_loader: bool = True
    is_syncing: bool = True
    index: int = 0
    loaders: list[PreparedLoader] = field(default_factory=list)

    def advance(self) -> None:
        """Begin the next micro-batch."""
        if self.ends_with_loader and self.loaders and self.loaders[-1].end_of_dataloader:
            self.index, self.is_syncing = 0, True
        else:
            self.index += 1
            self.is_syncing = self.index % self.num_steps == 0
