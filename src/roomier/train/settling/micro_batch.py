"""Micro-batches whose size differs from the size of the loader's batches. The number of samples per step stays the
same."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils.data import DataLoader

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.run.loaders import RunLoaders
from roomier.run.settled import Request


@dataclasses.dataclass(frozen=True)
class CutTo:
    """Function that reduces the size of micro-batches and increases their number per step. The number of samples per
    step stays the same.

    Args:
        size: maximum number of samples in a micro-batch on each rank. A micro-batch has the largest number of samples
            that does not exceed ``size`` and divides the number of samples in a step. None uses ``number``.
        number: number of micro-batches per step.
    """

    size: int | None = None
    number: int | None = None

    def __call__(self, plan: Plan, data: RunLoaders, request: Request) -> Plan:
        """Set the size of the micro-batches in ``data``, and return ``plan`` with the corresponding accumulation.

        Raises:
            RoomierError: the batches of the loader cannot be split.
        """
        of_step = samples_of_step(request, data)
        most = self.size or max(1, of_step // (self.number or 1))
        size = next(each for each in range(min(most, of_step), 0, -1) if of_step % each == 0)
        num = of_step // size
        notice(f"a step uses {num} micro-batches of {size} samples on each rank, with the same total number of samples")
        return with_micro_batch(plan, data, size, num)


def with_micro_batch(plan: Plan, data: RunLoaders, size: int, accumulate: int) -> Plan:
    """Set the size of the micro-batches in ``data`` to ``size`` samples, and return ``plan`` with ``accumulate``
    micro-batches per step."""
    if size != data.batch_size:
        data.set_batch_size(size)
    return with_accumulation(plan, accumulate)


def with_accumulation(plan: Plan, accumulate: int) -> Plan:
    """Return ``plan`` with ``accumulate`` micro-batches per step."""
    return dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, accumulate_grad_batches=accumulate))


def samples_of_step(request: Request, data: RunLoaders) -> int:
    """Return the number of samples that each rank contributes to an optimizer step in the requested plan.

    Raises:
        RoomierError: the number is unknown, or the micro-batches cannot be changed.
    """
    batch_size = data.batch_size
    reason = keeps_micro_batch(request, data, batch_size)
    if batch_size is None or reason:
        action = "Set the batch size of the loader and accumulate_grad_batches manually"
        problem = f"the size of micro-batches cannot be changed, because {reason}"
        raise RoomierError("auto_scale_batch_size", batch_size, problem, action)
    return batch_size * request.plan.batch.accumulate_grad_batches


def keeps_micro_batch(request: Request, data: RunLoaders, num_samples: int | None) -> str:
    """Return the reason why micro-batches must have the size of the loader's batches; empty if micro-batches may be
    smaller.

    Args:
        num_samples: number of samples in a batch that was read from the loader.
    """
    options, batch_size = request.options, data.batch_size
    if batch_size is None:
        return "the loader creates its batches itself"
    if batch_size != num_samples:
        return f"a batch has {num_samples} samples, but the loader has batch_size={batch_size}"
    counts = {
        "limit_train_batches": options.limit_train_batches not in (None, 1.0, options.num_dev_batches),
        "overfit_batches": bool(options.overfit_batches),
        "val_check_interval": options.val_check_interval not in (None, 1.0),
        "fast_dev_run": bool(options.num_dev_batches),
    }
    named = [name for name, is_set in counts.items() if is_set]
    if named:
        return f"{' and '.join(named)} counts micro-batches"
    loader = data.train_loader
    assert isinstance(loader, DataLoader)
    whole = batch_size * request.world.size
    sized: Any = loader.dataset
    if getattr(loader.batch_sampler, "drop_last", False) and len(sized) % whole:
        return "with drop_last=True, smaller batches would drop different samples"
    return ""
