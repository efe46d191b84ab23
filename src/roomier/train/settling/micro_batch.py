"""A micro-batch of another size than the loader's, and as many of them as make the same step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.run.loaders import RunLoaders

if TYPE_CHECKING:
    from roomier.trainer import Trainer


def settle_micro_batch(trainer: Trainer, data: RunLoaders) -> None:
    """Let ``data`` give micro-batches of ``trainer.micro_batch`` samples, or of the next fewer that make a whole step;
    or so many that ``trainer.num_micro_batches`` of them make one.

    Raises:
        RoomierError: the loader's batches cannot be cut.
    """
    if trainer.micro_batch is None and trainer.num_micro_batches is None:
        return
    of_step = samples_of_step(trainer, data)
    most = trainer.micro_batch or max(1, of_step // (trainer.num_micro_batches or 1))
    size = next(each for each in range(min(most, of_step), 0, -1) if of_step % each == 0)
    set_micro_batch(trainer, data, size, of_step // size)
    notice(f"a step takes {of_step // size} micro-batches of {size} samples on each rank: as many samples as before")


def set_micro_batch(trainer: Trainer, data: RunLoaders, size: int, accumulate: int) -> None:
    """Let a step take ``accumulate`` micro-batches of ``size`` samples."""
    if size != data.batch_size:
        data.set_batch_size(size)
    batch = dataclasses.replace(trainer.plan.batch, accumulate_grad_batches=accumulate)
    trainer.plan = dataclasses.replace(trainer.plan, batch=batch)


def samples_of_step(trainer: Trainer, data: RunLoaders) -> int:
    """Samples that each rank adds to an optimizer step, as the user asked for it.

    Raises:
        RoomierError: they cannot be counted, or cut in another way.
    """
    batch_size = data.batch_size
    reason = keeps_micro_batch(trainer, data, batch_size)
    if batch_size is None or reason:
        action = "Choose the batch size of the loader yourself, with accumulate_grad_batches"
        raise RoomierError("auto_scale_batch_size", batch_size, f"micro-batches stay as they are: {reason}", action)
    return batch_size * trainer.asked_plan.batch.accumulate_grad_batches


def keeps_micro_batch(trainer: Trainer, data: RunLoaders, num_samples: int | None) -> str:
    """Why micro-batches stay as the loader gives them; empty where they may be made smaller.

    Args:
        num_samples: of a batch that was looked at.
    """
    options, batch_size = trainer.options, data.batch_size
    if batch_size is None:
        return "the loader makes its batches itself"
    if batch_size != num_samples:
        return f"a batch has {num_samples} samples, where the loader speaks of {batch_size}"
    counts = {
        "limit_train_batches": options.limit_train_batches not in (None, 1.0),
        "overfit_batches": bool(options.overfit_batches),
        "val_check_interval": options.val_check_interval not in (None, 1.0),
        "fast_dev_run": bool(options.num_dev_batches),
    }
    named = [name for name, is_set in counts.items() if is_set]
    if named:
        return f"{' and '.join(named)} counts micro-batches"
    loader = data.train_loader
    assert isinstance(loader, DataLoader)
    whole = batch_size * trainer.world.size
    sized: Any = loader.dataset
    if getattr(loader.batch_sampler, "drop_last", False) and len(sized) % whole:
        return "drop_last=True drops other samples where batches are smaller"
    return ""
