"""Throughput: callback that logs samples, tokens and model FLOPs per second, and the model FLOPs utilization (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError
from roomier.core.tree import batch_size_of, tensors
from roomier.plan import Plan
from roomier.planner.hardware.devices import peak_flops_per_s


@runtime_checkable
class CountsFlops(Protocol):
    """Protocol for modules that compute their FLOPs themselves instead of using :func:`flops_per_token`."""

    def num_flops(self, batch: Any) -> float:
        """Return the number of floating-point operations of the forward and backward passes on ``batch``, without
        recomputation."""
        ...


class Throughput(Callback):
    """Callback that logs the throughput since the previous log step.

    - ``samples_per_s`` and ``tokens_per_s`` count the batches of all ranks. The number of tokens is the number of
      elements of ``input_ids``, or of the first integer tensor with two dimensions.
    - ``model_flops_per_s`` counts the operations of the model, without recomputation. If the module defines
      ``num_flops(batch)``, this method provides the number of operations. Otherwise, the number is
      :func:`flops_per_token` times the number of tokens, and the metric is not logged if the batch has no tokens.
    - ``mfu`` is ``model_flops_per_s`` as a fraction of the peak performance of all devices. This metric is logged only
      if the peak performance is known.

    The clock starts after the first optimizer step (warm-up) and stops during validation. The measured time includes
    the time for saving checkpoints. Counts are computed from shapes, and the device is synchronized only at log steps.

    Args:
        peak_flops_per_s: peak performance of one device at the precision of the run, in FLOP/s; by default, the value
            in the data sheet of the device.

    Raises:
        RoomierError: ``peak_flops_per_s`` is not positive.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[Throughput()])
    """

    reads_parameters = False

    def __init__(self, peak_flops_per_s: float | None = None) -> None:
        if peak_flops_per_s is not None and not peak_flops_per_s > 0:
            raise RoomierError("peak_flops_per_s", peak_flops_per_s, "must be positive", "Use FLOP/s such as 312e12")
        self._given_peak = peak_flops_per_s
        self._peak: float | None = None
        self._num_flops_of: Callable[[Any], float] | None = None
        self._flops_per_token = 0.0
        self._last_step = 0
        self._paused_s = 0.0
        self._start_window()

    def _start_window(self) -> None:
        self._num_samples = self._num_tokens = 0
        self._num_flops = 0.0
        self._began_s: float | None = None

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._num_flops_of = pl_module.num_flops if isinstance(pl_module, CountsFlops) else None
        self._flops_per_token = flops_per_token(pl_module)
        self._peak = self._given_peak or _peak_of_plan(pl_module.device, trainer.plan)
        self._last_step = trainer.global_step
        self._start_window()

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        step = trainer.global_step
        if self._began_s is None:
            if step != self._last_step:
                self._began_s, self._last_step = time.monotonic(), step
            return
        num_tokens = num_tokens_of(batch)
        self._num_samples += batch_size_of(batch)
        self._num_tokens += num_tokens
        num_flops = self._flops_per_token * num_tokens if self._num_flops_of is None else self._num_flops_of(batch)
        self._num_flops += num_flops
        if step // trainer.log_every_n_steps != self._last_step // trainer.log_every_n_steps:
            self._log(trainer, pl_module.device)
            self._last_step = step

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._paused_s = time.monotonic()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._began_s is not None:
            self._began_s += time.monotonic() - self._paused_s

    def _log(self, trainer: TrainerView, device: torch.device) -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        now_s = time.monotonic()
        assert self._began_s is not None
        elapsed_s = max(now_s - self._began_s, 1e-9)
        counts = torch.tensor([self._num_samples, self._num_tokens, self._num_flops], dtype=torch.float64)
        num_samples, num_tokens, num_flops = trainer.ranks.data.sum(counts).tolist()
        rates = {"samples_per_s": num_samples / elapsed_s}
        if num_tokens:
            rates["tokens_per_s"] = num_tokens / elapsed_s
        if num_flops:
            rates["model_flops_per_s"] = num_flops / elapsed_s
            if self._peak is not None:
                rates["mfu"] = rates["model_flops_per_s"] / (self._peak * trainer.world_size)
        trainer.log_metrics(rates)
        self._start_window()
        self._began_s = now_s


def num_tokens_of(batch: Any) -> int:
    """Return the number of elements of ``batch["input_ids"]``, or of the first integer tensor with two dimensions; 0 if
    neither exists.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return int(batch["input_ids"].numel())
    for tensor in tensors(batch):
        if tensor.dim() == 2 and tensor.dtype in _INTEGER_DTYPES:
            return tensor.numel()
    return 0


_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.uint16)


def flops_per_token(model: nn.Module) -> float:
    """Return the FLOPs per token: 6 for each trained parameter in matrix products, and 4 for each frozen parameter.

    The forward pass, the gradient of the input and the gradient of the parameter each require 2 FLOPs: one
    multiplication and one addition. See section 2.1 of Kaplan et al. 2020, "Scaling Laws for Neural Language Models".
    The count omits attention scores, which are small if the sequence is shorter than about 6 times the width. The count
    also omits embeddings, except embeddings that are tied to an output layer.
    """
    multiplied = {p for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return float(sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied))


def _peak_of_plan(device: torch.device, plan: Plan) -> float | None:
    """Return the peak performance at the precision of the Plan's matrix products; None if it is unknown."""
    mode, matmul = plan.precision.mode, plan.precision.matmul
    if mode == "64-true":
        return None
    if mode == "32-true":
        return peak_flops_per_s(device, {"highest": "32", "high": "tf32", "medium": "16"}[matmul])
    return peak_flops_per_s(device, "16")
