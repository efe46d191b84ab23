"""Ray Train: submission of a job, and a callback with which Ray shows the metrics and the committed checkpoints of a
run, and removes old checkpoints.

A Trainer in a function of Ray Train needs no callback to join the ranks, or to resume after Ray has restarted them
(``launch/ray_run.py``).
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.checkpoint_ledger import Ledger, Retention
from roomier.callbacks.model_checkpoint import ModelCheckpoint
from roomier.callbacks.monitored import scalar
from roomier.checkpoint.uploads import Uploads
from roomier.core.errors import RoomierError, TrainingError
from roomier.engines.manifests import NUM_RESTARTS, ClusterJob
from roomier.launch.ray_run import ray_run
from roomier.storage.mirror import remote_of

__all__ = ["RayTrainReport", "submit"]

_CONNECT_S = 5.0


class RayTrainReport(ModelCheckpoint):
    """ModelCheckpoint that reports each committed checkpoint and the logged metrics to Ray Train.

    Ray lists a checkpoint in its ``Result`` where the run has saved it, without a copy. Ray also removes old
    checkpoints, so ``ray.train.CheckpointConfig`` selects the ones to keep; by default, Ray keeps all. If the run
    folder is in remote storage, only the metrics are reported, and all checkpoints are kept.

    Args:
        options: arguments of :class:`roomier.callbacks.ModelCheckpoint`, such as ``every_n_train_steps`` and
            ``async_save``. Arguments that select checkpoints are not supported.

    Raises:
        RoomierError: the process is not a worker of Ray Train, or the checkpoints are not in the storage of Ray.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[RayTrainReport(every_n_train_steps=100)])
    """

    def __init__(self, **options: Any) -> None:
        defaults = inspect.signature(ModelCheckpoint.__init__).parameters
        for name in ("monitor", "mode", "save_top_k", "save_last", "format"):
            value = options.pop(name, defaults[name].default)
            if value != defaults[name].default:  # the command line passes all arguments
                problem = "is not supported, because Ray selects the checkpoints that are kept"
                action = "Use ray.train.CheckpointConfig(num_to_keep=..., checkpoint_score_attribute=...)"
                raise RoomierError(f"RayTrainReport({name})", value, problem, action)
        super().__init__(save_top_k=0, save_last=True, **options)
        self._values: dict[int, dict[str, float]] = {}

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._is_fitting and ray_run() is None:
            action = "Call fit in the function of a ray.train.torch.TorchTrainer, or use ModelCheckpoint"
            raise RoomierError("callbacks", type(self).__name__, "requires a worker of Ray Train", action)

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        super().on_train_start(trainer, pl_module)
        from ray.train import get_checkpoint  # late import: an optional package

        path, listed = self._ledger.last, get_checkpoint()
        if path and (listed is None or listed.path != path):  # the run ended between the commit and the report
            self._report(trainer, self._ledger.step, path)

    def _save(self, trainer: TrainerView, score: float | None, keep: Retention) -> None:
        values = {name: scalar(value) for name, value in self._metrics(trainer).items()}
        self._values = {self._newest_ledger.step: self._values.get(self._newest_ledger.step, {})}
        self._values[trainer.global_step] = values
        super()._save(trainer, score, keep)

    def _committed(self, trainer: TrainerView, ledger: Ledger) -> None:
        super()._committed(trainer, ledger)
        self._report(trainer, ledger.step, ledger.newest_path)

    def _report(self, trainer: TrainerView, step: int, path: str) -> None:
        from ray.train import Checkpoint, CheckpointUploadMode, report  # late import: an optional package

        is_listed = trainer.is_global_zero and remote_of(Path(path)) is None
        checkpoint = Checkpoint.from_directory(path) if is_listed else None
        # Each rank must call this function. Ray attaches the metrics of rank 0.
        report(self._values[step], checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "values": self._values.get(self._newest_ledger.step, {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._values = {state_dict["step"]: state_dict["values"]}

    def _remove_superseded(self, paths_of_others: set[str], uploads: Uploads | None) -> None:
        """Leave old checkpoints to Ray, whose list contains them."""


def submit(job: ClusterJob, function: Callable[[Sequence[str]], None], storage: str | None) -> None:
    """Run ``job`` with Ray Train on the cluster of ``RAY_ADDRESS``, and wait until it ends.

    Args:
        job: the job. With a range of nodes, Ray starts as many workers as the cluster has resources for.
        function: function that each worker calls with the words of the job's command.
        storage: folder or address in which Ray stores the run; None for Ray's default.

    Raises:
        RoomierError: Ray is not installed, or the cluster cannot be reached.
        Exception: the error of a worker that failed too often, or twice in succession with the same error.
    """
    try:
        import ray  # late imports: an optional package
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        problem = "requires the package ray[train], which is not installed"
        raise RoomierError("--to", "ray", problem, "Run: pip install 'roomier[ray]'") from error
    action = "Set it to the address of the cluster, such as 10.0.0.1:6379, or to local for a cluster on this machine"
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise RoomierError("RAY_ADDRESS", address, "is required for ray", action)
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # workers start in the copy of this folder
    least, most = job.nodes.least * job.devices, job.nodes.most * job.devices
    is_gpu = job.kind == "cuda"
    own = {"CPU": 1, "memory": job.memory_bytes // job.devices, **({"GPU": 1} if is_gpu else {})}
    trainer = TorchTrainer(
        partial(function, job.command),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if is_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most), use_gpu=is_gpu, resources_per_worker=own
        ),
        run_config=RunConfig(
            name=job.name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=NUM_RESTARTS),
            callbacks=[_ends_repeated_errors()],
        ),
    )
    try:
        head = urlsplit(f"//{address.removeprefix('ray://')}")
        if head.port:  # not auto or local. Ray tries for several minutes to reach a head that does not answer
            socket.create_connection((str(head.hostname), head.port), _CONNECT_S).close()
        cluster = ray.init(address, runtime_env={"working_dir": os.getcwd()})
    except (OSError, RuntimeError, ValueError) as error:
        raise RoomierError("RAY_ADDRESS", address, f"Ray cannot connect ({error})", action) from error
    with cluster:
        trainer.fit()


def _ends_repeated_errors() -> Any:
    """Return a callback of Ray that ends a job after a second failure with the same error, because it is not an error
    of the cluster."""
    from ray.train import UserCallback  # late import: an optional package

    class EndsRepeatedErrors(UserCallback):  # type: ignore[misc]  # Any
        last: frozenset[str] = frozenset()

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            errors = frozenset(
                f"{type(error).__name__}: {error}"
                for error in worker_exceptions.values()
                # The loss of a worker raises these errors, also in other workers.
                if not isinstance(error, (OSError, RuntimeError)) and not type(error).__module__.startswith("ray.")
            )
            repeated, self.last = errors & self.last, errors
            if repeated:
                problem = f"failed again with {', '.join(sorted(repeated))}"
                action = "Correct the error, whose traceback is above, and repeat the command to resume"
                raise TrainingError("job", run_context.run_config.name, problem, action)

    return EndsRepeatedErrors()
