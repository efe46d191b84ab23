"""Rows for the values that the batches of an evaluation log with ``on_step=True``, one row per batch as in Lightning.

The rows are written at the end of the evaluation. Batches therefore do not wait for the device, and an evaluation that
a signal interrupts writes no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class StepRows:
    """Rows of one evaluation.

    Args:
        num_batches: for each loader, the number of batches of earlier evaluations. The step of a row is the number of
            its batch.
    """

    def __init__(self, num_batches: dict[str, int]) -> None:
        self._num_before = num_batches
        self._num_new: Counter[str] = Counter()
        self._rows: list[tuple[int, dict[str, Any]]] = []

    def add(self, loader: int, values: Mapping[str, Any]) -> None:
        """Add one batch of the loader with index ``loader``. ``values`` may be on the device, and may be empty."""
        name = str(loader)
        index = self._num_before.get(name, 0) + self._num_new[name]
        self._num_new[name] += 1
        if values:
            self._rows.append((index, {name: _small(value) for name, value in values.items()}))

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows at the end of the evaluation, and add its batches to ``num_batches``.

        Batches before the first row of the run are not counted, so a run without rows stores no numbers.
        """
        for name, number in self._num_new.items() if self._rows or self._num_before else ():
            self._num_before[name] = self._num_before.get(name, 0) + number
        return self._rows


def _small(value: Any) -> Any:
    """Return ``value``, or a copy if the tensor is a view that would retain a larger tensor."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.element_size():
        return value.clone()
    return value
