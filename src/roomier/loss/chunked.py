"""Cross-entropy of a linear layer's output, some tokens at a time."""

from __future__ import annotations

from torch import nn


def apply_chunked_loss(network: nn.Module, chunk_tokens: int | None) -> None:
    """Let the output layer of ``network`` and the cross-entropy after it compute in chunks.

    Raises:
        RoomierError: no output layer is found.
    """
