"""Every underscore name of torch that roomier uses, with the version it was checked on (2.11 and 2.13)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader


def found_inf(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """The flags (0-dim float, one a device) that ``scaler`` set while it unscaled ``optimizer``."""
    return list(scaler._found_inf_per_device(optimizer).values())


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel itself leaves out a step with infinite gradients (fused ones do)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def tell_stepped(optimizer: Optimizer) -> None:
    """Let schedulers take this step as done; else they warn where the first one was left out by a loss scale."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def last_forward_value(metric: Any) -> Any:
    """What the last call of a torchmetrics metric returned (its underscore name; torchmetrics 1.4 to 1.9)."""
    return metric._forward_cache


def load_metric_state(metric: Any, state: Mapping[str, Any], num_updates: int) -> None:
    """Put back ``metric.metric_state`` and ``metric.update_count`` of a torchmetrics metric, which have no public
    setter (torchmetrics 1.4 to 1.9)."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = num_updates
    metric._computed = None


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Let a copy of a DataLoader start workers of its own: the iterator of persistent ones is kept on the loader."""
    loader._iterator = None


def end_workers(iterator: Any) -> None:
    """End the worker processes of the iterator of a DataLoader now, unless they are to outlive it."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    if isinstance(iterator, _MultiProcessingDataLoaderIter) and not iterator._persistent_workers:
        iterator._shutdown_workers()


def scale_each(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each of ``tensors`` by ``factor`` (0-dim), in place and in one call."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor.to(tensors[0].device))
