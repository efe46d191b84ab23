"""DeviceStatsMonitor: how full the device and the host are, in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import torch

from roomier.api.callback import Callback
from roomier.core.errors import RoomierError

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView


class DeviceStatsMonitor(Callback):
    """Logs, at log steps, the allocator's statistics of a CUDA device and the load of the host.

    Names are Lightning's: ``DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current`` (bytes, as
    ``torch.cuda.memory_stats`` has them), ``.../cpu_percent``, ``.../cpu_vm_percent``, ``.../cpu_swap_percent``; once
    before and once after the step of a log row, and after each evaluation. They are those of the first rank. Reading
    them does not wait for the device.

    Args:
        cpu_stats: log the load of the host; None: where training runs on the CPU.

    Raises:
        RoomierError: when a fit begins, that there is no logger.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._last_step = -1

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit" and not trainer.loggers and not trainer.fast_dev_run:
            raise RoomierError(
                "DeviceStatsMonitor", None, "there is no logger to write to", "Leave out logger=False, or this callback"
            )

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._last_step = trainer.global_step
        psutil.cpu_percent()  # the next one is since this one

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        if is_first and (step + 1) % trainer.log_every_n_steps == 0:
            self._log(trainer, "on_train_batch_start")

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        if step % trainer.log_every_n_steps == 0:
            self._log(trainer, "on_train_batch_end")

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, "on_validation_end")

    def on_test_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._log(trainer, "on_test_end")

    def _log(self, trainer: TrainerView, moment: str) -> None:
        device = trainer.engine.device
        stats: dict[str, float] = {}
        if device.type == "cuda":
            stats.update(torch.cuda.memory_stats(device))
        if self._cpu_stats or (self._cpu_stats is None and device.type == "cpu"):
            stats.update(cpu_stats())
        if stats:
            prefix = f"{type(self).__qualname__}.{moment}"
            trainer.log_metrics({f"{prefix}/{name}": value for name, value in stats.items()})


def cpu_stats() -> dict[str, float]:
    """The load of this host in percent: processors since the last call, memory and swap now."""
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
