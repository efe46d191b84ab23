"""Default number of terms over which the loss of a batch is averaged.

[Note: weighted accumulation]
Let ``g_i`` be the gradient of a loss that is a mean over the ``n_i`` terms of micro-batch ``i``. The gradient of the
full batch is ``sum(n_i * g_i) / sum(n_i)``. The mean of the ``g_i`` differs from this gradient if the ``n_i`` differ.
The engine weights each micro-batch by ``n_i / sum(n_i)`` before its backward pass, so the counts must be known before
the first backward pass. The counts are computed from the batches on the host, so no synchronization with a device is
required.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roomier.core.tree import batch_size_of

IGNORE_INDEX = -100  # the default ignore_index of F.cross_entropy
TARGET_KEYS = ("labels", "targets", "target", "label", "y")


def count_loss_terms(batch: Any, *, is_shifted_inside: bool = False, ignored_label: int = IGNORE_INDEX) -> int | Tensor:
    """Return the number of terms over which a loss of ``batch`` is averaged.

    Integer targets are counted, except targets equal to ``ignored_label``. Without integer targets, samples are
    counted.

    Args:
        batch: a mapping with one of the keys ``labels, targets, target, label, y``; or ``(inputs..., targets)``.
        is_shifted_inside: True if the model drops the first target of each row, as causal models of Hugging Face do.
            Targets under the key ``shift_labels`` are not shifted.
        ignored_label: the target value that is not counted.

    Returns:
        An int if the targets are on the CPU. A 0-dim tensor if the targets are on an accelerator, to avoid waiting for
        the accelerator.
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
