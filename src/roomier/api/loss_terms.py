"""How many terms the loss of a batch averages over: the default answer.

[Note: weighted accumulation]
A loss that is a mean over ``n_i`` terms of micro-batch ``i`` has the gradient ``g_i``. The gradient of the whole
batch is ``sum(n_i * g_i) / sum(n_i)``; the mean of the ``g_i`` is another number as soon as the ``n_i`` differ. The
engine weights each micro-batch by ``n_i / sum(n_i)`` before its backward, so the counts must be known before the
first one: they are read off the batches on the host, where that costs no wait for a device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roomier.core.tree import batch_size_of

IGNORE_INDEX = -100  # the default of F.cross_entropy, and the convention of the field
TARGET_KEYS = ("labels", "targets", "target", "label", "y")


def count_loss_terms(batch: Any, *, is_shifted_inside: bool = False, ignored_label: int = IGNORE_INDEX) -> int | Tensor:
    """The number of terms a mean loss over ``batch`` has.

    Integer targets are counted without those equal to ``ignored_label``; anything else counts by samples.

    Args:
        batch: a mapping with one of the keys ``labels, targets, target, label, y``; or ``(inputs..., targets)``.
        is_shifted_inside: the model drops the first target of each row (Hugging Face's causal models do). Targets that
            the batch has as ``shift_labels`` are taken as they are.

    Returns:
        An int for targets on the CPU, a 0-dim tensor for targets on another device (no wait for it).
    """
    shifted = batch.get("shift_labels") if is_shifted_inside and isinstance(batch, Mapping) else None
    targets = shifted if isinstance(shifted, Tensor) else _targets(batch)
    if targets is None or targets.is_floating_point() or targets.dtype is torch.bool or targets.dim() == 0:
        return batch_size_of(batch)
    if is_shifted_inside and targets is not shifted and targets.dim() > 1:
        targets = targets[..., 1:]
    count = (targets != ignored_label).sum()
    return int(count) if targets.device.type == "cpu" else count


def _targets(batch: Any) -> Tensor | None:
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in TARGET_KEYS if key in batch), None)
    elif isinstance(batch, (list, tuple)) and len(batch) > 1:
        found = batch[-1]
    else:
        return None
    return found if isinstance(found, Tensor) else None
