"""``fit(weights=...)``: what a model begins with, from safetensors files or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from roomier import checkpoint
from roomier.adapters.layers import is_adapter
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.lightning import is_lightning_file
from roomier.checkpoint.record import RECORD_OF_DCP
from roomier.checkpoint.run_state import peek_run
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.engine.weights_file import WeightsFile
from roomier.plan import Plan
from roomier.run.run import Run
from roomier.run.settled import FirstWeights
from roomier.train.saving.lightning_resume import LightningWeights
from roomier.train.saving.restore import restore_weights

_RECORD_OF_CHECKPOINT = "run.json"


@dataclass(frozen=True)
class PlainCheckpoint:
    """The weights of a checkpoint of the plain model, for one with adapters: read before its weights become codes."""

    path: Path
    ranks: Ranks

    def check(self, network: nn.Module) -> set[str]:
        tensors = {**network.state_dict(), **dict(network.named_parameters(remove_duplicate=False))}
        return {name for name in tensors if not is_adapter(name)}

    def read_into(self, network: nn.Module) -> None:
        plain = {name: each for name, each in network.state_dict().items() if not is_adapter(name)}
        try:
            read = checkpoint.load(self.path, into={"module": plain}, only=("module",), ranks=self.ranks)["module"]
        except CheckpointError as error:
            raise CheckpointError("weights", str(self.path), error.problem, error.action) from error
        network.load_state_dict(read, strict=False)  # tensors are there already; what a module keeps beside them is not


def first_weights(weights: object, ckpt_path: Path | None, plan: Plan, ranks: Ranks) -> FirstWeights:
    """What ``weights`` means.

    Args:
        weights: path of a safetensors file, of a folder of them, of a checkpoint, or of a Lightning ``.ckpt``; or None.
        ckpt_path: the run goes on from it, so ``weights`` is not read.

    Raises:
        RoomierError: it is no path, or there is nothing of the kind.
    """
    if weights is None:
        return FirstWeights()
    if not isinstance(weights, (str, Path)):
        action = "Pass a .safetensors file, a folder with model.safetensors, or a checkpoint (Lightning's .ckpt too)"
        raise RoomierError("weights", weights, "is not a path", action)
    if ckpt_path is not None:
        notice(f"weights={str(weights)!r} is not read: the run goes on from {ckpt_path}")
        return FirstWeights()
    path = at_home(weights)
    if (path / _RECORD_OF_CHECKPOINT).is_file():
        if plan.adapter.lora_rank is not None and not _has_adapters(path):
            return FirstWeights(file=PlainCheckpoint(path, ranks))
        return FirstWeights(checkpoint=path)
    if is_lightning_file(path):
        return FirstWeights(file=LightningWeights(path, ranks))
    _check_is_no_folder_of_checkpoints(path)
    return FirstWeights(file=WeightsFile(path))


def restore_first_weights(run: Run) -> None:
    """Load the weights that the model of ``run`` begins with, if they are in a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another model.
    """
    path = run.settled.start.weights.checkpoint
    if path is None:
        return
    try:
        restore_weights(run, path)
    except CheckpointError as error:
        raise CheckpointError("weights", str(path), error.problem, error.action) from error


def _check_is_no_folder_of_checkpoints(path: Path) -> None:
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return
    newest = checkpoint.find_last(path)
    if newest is not None:
        problem = "is no checkpoint, but a folder that holds some"
        raise RoomierError("weights", str(path), problem, f"Pass one of them; the newest is {newest}")
    if (path / RECORD_OF_DCP).is_file():
        _peek(path)  # which says what it is, and what to do


def _has_adapters(path: Path) -> bool:
    return any(is_adapter(name) for name in _peek(path).get("module", {}))


def _peek(path: Path) -> dict[str, Any]:
    try:
        return peek_run(path)
    except CheckpointError as error:
        raise CheckpointError("weights", str(path), error.problem, error.action) from error
