"""ElasticRanks: callback with which a run continues without ranks that were killed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roomier.api.callback import Callback
from roomier.api.lightning_module import LightningAdapter
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.checkpoint.commit import absolute
from roomier.core.device.rng import rng_state
from roomier.core.errors import RoomierError
from roomier.core.tree import map_tensors
from roomier.engine.structure import Structure
from roomier.plan.parts import AdapterPlan, CompilePlan, OffloadPlan
from roomier.run.logged.metric_state import metric_states, metrics_of
from roomier.run.run import Run, run_of

if TYPE_CHECKING:  # a single rank does not need it
    from roomier.launch.survivors import KillWatch

_STRATEGIES = ("ddp", "zero2", "zero3")
_PLAIN_FEEDS = ("ordered", "list")  # other feeds have a position on each rank, which is lost with the rank


class ElasticRanks(Callback):
    """Callback with which a run on CPUs continues without ranks that were killed, for example because the machine ran
    out of memory.

    The processes of the other ranks survive. They form a new process group, divide the same global batch among
    themselves, and open the run again, as if ``fit`` were called with ``ckpt_path``, so hooks such as ``setup`` and
    ``on_fit_start`` are called again. With ``strategy="ddp"``, they continue from the state of the survivor that
    completed the most steps, so no completed step is repeated. If a part of the state is lost, as with other strategies
    or the position of a stream, they continue from the newest snapshot of :class:`PeerSnapshots`, or from the newest
    checkpoint of the run.

    On several machines, torchft's lighthouse at the address in ``TORCHFT_LIGHTHOUSE`` determines the ranks that are
    left. If a rank is killed, its machine ends, and the other machines continue. A machine that loses power is noticed
    after ``hang_timeout``.

    The run ends, as without this callback, if rank 0 is killed on a single machine, if a rank raises an error, if a
    further rank is killed while the others form the new process group, or if there is no state from which the run can
    continue.

    Args:
        place: folder in memory, through which a survivor passes its state to the others. Several machines use
            ``default_root_dir`` instead, which they must share.

    Raises:
        RoomierError: when training starts, if roomier did not start the ranks, if they run on accelerators or, without
            a lighthouse, on several machines, if the strategy is not ``"ddp"``, ``"zero2"`` or ``"zero3"``, or with
            LoRA, offloading, compile, or ranks that share samples.

    Example:
        >>> trainer = roomier.Trainer(strategy="ddp", devices=4, callbacks=[ElasticRanks()])
    """

    reads_parameters = False

    def __init__(self, place: str | Path = "/dev/shm") -> None:
        self.place = absolute(place)
        self.received: Path | None = None
        self.held: dict[str, Any] | None = None
        self.is_at_save_point = False
        self.structure: Structure | None = None
        self._watch: KillWatch | None = None
        self._has_failed = False
        self._step = -1
        self._num_ranks: int | None = None  # of a fit before its losses

    def take_watch(self) -> KillWatch | None:
        """Return the watch of the last fit, which the caller must close; None if the fit ended without an error."""
        watch, self._watch = self._watch, None
        return watch

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self.structure = Structure(pl_module)

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        run, received = run_of(trainer, "ElasticRanks"), self.received
        if received is not None:
            if run.saves.path is not None and run.saves.path.parent == received:
                run.saves.step = run.saves.path = None
            run.ranks.barrier()  # all ranks have read the state
            self._remove(trainer)

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        run = run_of(trainer, "ElasticRanks")
        self._has_failed, self.held, self._step = False, None, trainer.global_step
        if run.settled.request.continues is None:
            self._check_number(run.ranks.world.size)
        if run.ranks.is_alone:
            return
        from roomier.launch import group  # late import: a single rank does not need it

        self._watch = group.watch_kills()
        if self._watch is None:
            problem = "requires ranks that roomier started on CPUs and, on several machines, TORCHFT_LIGHTHOUSE"
            action = "Start the script with `python`, or use PeerSnapshots with a launcher that restarts the job"
            raise RoomierError("callbacks", type(self).__name__, problem, action)
        run.ranks.barrier()  # a lighthouse waits only for ranks that have connected to it
        requested = run.settled.request.plan
        parallel, parts = requested.parallel, (requested.adapter, requested.offload, requested.compile)
        action = f"Remove {type(self).__name__}, or this setting"
        if parallel.strategy not in _STRATEGIES or parallel.num_peers > 1:
            problem = (
                f"cannot continue without killed ranks; only {', '.join(_STRATEGIES)} can, without other parallelism"
            )
            raise RoomierError("strategy", parallel.strategy, problem, action)
        if parts != (AdapterPlan(), OffloadPlan(), CompilePlan()):
            problem = "continues only runs without LoRA, offloading and compile"
            raise RoomierError("callbacks", type(self).__name__, problem, action)
        if isinstance(run.module, LightningAdapter) or not run.module.automatic_optimization:
            problem = "continues only Modules with automatic optimization, whose losses are weighted by their terms"
            raise RoomierError("callbacks", type(self).__name__, problem, f"Remove {type(self).__name__}")
        if not self.place.is_dir():
            action = "Pass a folder in memory, such as '/dev/shm'"
            raise RoomierError("ElasticRanks(place)", str(self.place), "is not a folder", action)
        self._hold(run, is_at_save_point=True)
        if self.held is not None and run.now.random_state is not None:
            self.held["random"] = {"0": run.now.random_state}  # restored after this hook

    def _check_number(self, size: int) -> None:
        if self._num_ranks not in (None, size):
            problem = f"are the ranks that remain of {self._num_ranks}, so a new fit would use another global batch"
            raise RoomierError("devices", size, problem, "Call fit once in a script, or start the script again")
        self._num_ranks = size

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        if self._watch is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self._hold(run_of(trainer, "ElasticRanks"), is_at_save_point=False)

    def on_save_point(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._watch is not None:
            self._hold(run_of(trainer, "ElasticRanks"), is_at_save_point=True)

    def _hold(self, run: Run, *, is_at_save_point: bool) -> None:
        """Keep the parts of the state that the next step changes before its update, without communication."""
        parallel, data, window = run.plan.parallel, run.source, run.now.window
        if parallel.strategy != "ddp" or parallel.num_peers > 1 or data.kind not in _PLAIN_FEEDS:
            return
        results = run.results.state(metrics_of(run.module), of_all_ranks=False)
        self.is_at_save_point = is_at_save_point
        self.held = {
            "window": None if window is None else replace(window, batches=()),
            "progress": run.progress.state(),
            "random": {"0": rng_state()},
            "data": data.state_dict(),
            "results": map_tensors(_copied, results),
            "metrics": {"0": metric_states(run.module)},
            "buffers": {name: _copied(each) for name, each in run.engine.module.named_buffers()},
        }

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        self._has_failed = True

    def _remove(self, trainer: TrainerView) -> None:
        received, self.received = self.received, None
        if received is not None and trainer.world.is_global_zero:
            shutil.rmtree(received, ignore_errors=True)

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._remove(trainer)
        if not self._has_failed and (watch := self.take_watch()) is not None:
            watch.close()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
