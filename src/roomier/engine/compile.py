"""Blocks compiled one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each of ``blocks``, in place.

    Raises:
        RoomierError: there are no blocks.
    """


def undo_compile(network: nn.Module) -> None:
    """Let all parts of ``network`` run uncompiled."""
