"""Checks of the sizes that all language models have."""

from torch import Tensor

from roomier.core.errors import RoomierError


def check_positive(config: object, *fields: str) -> None:
    """Raise RoomierError if a field of ``config`` is less than 1."""
    for field in fields:
        if getattr(config, field) < 1:
            raise RoomierError(field, getattr(config, field), "must be at least 1", "Use a positive integer")


def check_heads(width: int, num_heads: int) -> None:
    """Raise RoomierError if ``width`` cannot be divided among the attention heads."""
    if width % num_heads:
        problem = f"must be divisible by the {num_heads} heads"
        raise RoomierError("width", width, problem, "Make the width a multiple of num_heads")


def check_length(input_ids: Tensor, context: int) -> None:
    """Raise RoomierError if the sequences ``[B, T]`` are longer than ``context``."""
    if context < input_ids.shape[1]:
        problem = f"must have at most {context} positions, the context of the model"
        raise RoomierError("input_ids", tuple(input_ids.shape), problem, "Shorten the sequences or raise context")
