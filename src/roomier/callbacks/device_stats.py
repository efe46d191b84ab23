"""DeviceStatsMonitor: callback that logs the memory statistics of the device and the load of the host."""

from __future__ import annotations

from typing import Any

import psutil

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.monitored import RequiresLogger
from roomier.core.device import memory


class DeviceStatsMonitor(RequiresLogger):
    """Callback that logs the statistics of the device's allocator and the load of the host.

    The metric names are the same as in Lightning: ``DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current``
    (a size in bytes, with torch's name), ``.../cpu_percent``, ``.../cpu_vm_percent`` and ``.../cpu_swap_percent``. The
    callback logs the values of the first rank before and after each log step, and after each validation and test run.
    Reading them does not synchronize with the device.

    Args:
        cpu_stats: if True, log the load of the host; None logs the load only if training runs on the CPU.

    Raises:
        RoomierError: the Trainer has no logger when a fit starts.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[DeviceStatsMonitor()])
    """

    reads_parameters = False

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._last_step = -1

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._last_step = trainer.global_step
        psutil.cpu_percent()  # The next call of cpu_percent returns the load since this call.

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        if is_first and (step + 1) % trainer.log_every_n_steps == 0:
            self._log(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
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
        stats: dict[str, float] = dict(memory.statistics(device))
        if self._cpu_stats or (self._cpu_stats is None and device.type == "cpu"):
            stats["cpu_percent"] = psutil.cpu_percent()  # since the last call
            stats["cpu_vm_percent"] = psutil.virtual_memory().percent
            stats["cpu_swap_percent"] = psutil.swap_memory().percent
        if stats:
            prefix = f"{type(self).__qualname__}.{moment}"
            trainer.log_metrics({f"{prefix}/{name}": value for name, value in stats.items()})
