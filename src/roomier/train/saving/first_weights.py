"""``fit(weights=...)``: the initial weights of a model, from safetensors files or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from roomier import checkpoint
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.lightning import is_lightning_file
from roomier.checkpoint.record import RECORD_OF_DCP
from roomier.checkpoint.run_state import peek_run
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.log import notice
from roomier.core.paths import check_path
from roomier.core.ranks import Ranks
from roomier.engine.weights_file import WeightsFile, prepare_nothing
from roomier.plan import Plan
from roomier.plan.migrate.deepspeed.checkpoints import refuse_deepspeed_checkpoint
from roomier.run.run import Run
from roomier.run.settled import FirstWeights
from roomier.techniques.adapters.layers import is_adapter
from roomier.train.saving.lightning_resume import LightningWeights
from roomier.train.saving.restore import restore_weights

_RECORD_OF_CHECKPOINT = "run.json"


@dataclass(frozen=True)
class PlainCheckpoint:
    """Weights from a checkpoint without adapters, for a model that has adapters. The weights are read before
    quantization.

    Args:
        path: path of the checkpoint.
        ranks: the ranks that read the checkpoint together.
    """

    path: Path
    ranks: Ranks

    def check(self, network: nn.Module) -> set[str]:
        """Return the names of the tensors in ``network`` that the checkpoint provides, which are all tensors except
        adapters."""
        tensors = {**network.state_dict(), **dict(network.named_parameters(remove_duplicate=False))}
        return {name for name in tensors if not is_adapter(name)}

    def read_into(self, network: nn.Module, prepare: Callable[[Tensor], object] = prepare_nothing) -> None:
        """Read the weights into the tensors of ``network``.

        Args:
            prepare: unused; required by the protocol :class:`WeightsToRead`.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not match the model.
        """
        plain = {name: each for name, each in network.state_dict().items() if not is_adapter(name)}
        try:
            read = checkpoint.load(self.path, into={"module": plain}, only=("module",), ranks=self.ranks)["module"]
        except CheckpointError as error:
            raise CheckpointError("weights", str(self.path), error.problem, error.action) from error
        network.load_state_dict(read, strict=False)  # calls set_extra_state; the tensors already contain the weights


def first_weights(weights: object, ckpt_path: Path | None, plan: Plan, ranks: Ranks) -> FirstWeights:
    """Return the source of the initial weights; an empty source if there are no weights to read.

    Args:
        weights: path of a safetensors file, a folder of safetensors files, a checkpoint or a Lightning ``.ckpt`` file;
            None for no initial weights.
        ckpt_path: the checkpoint that the run resumes from. If this argument is set, ``weights`` is not read.

    Raises:
        RoomierError: ``weights`` is not a path, or no such file exists.
    """
    if weights is None:
        return FirstWeights()
    if not isinstance(weights, (str, Path)):
        action = "Pass a .safetensors file, a folder with model.safetensors, or a roomier or Lightning checkpoint"
        raise RoomierError("weights", weights, "is not a path", action)
    if ckpt_path is not None:
        notice(f"weights={str(weights)!r} is not read, because the run resumes from {ckpt_path}")
        return FirstWeights()
    check_path("weights", weights)
    path = at_home(weights)
    if (path / _RECORD_OF_CHECKPOINT).is_file():
        if plan.adapter.lora_rank is not None and not any(is_adapter(name) for name in _peek(path).get("module", {})):
            return FirstWeights(file=PlainCheckpoint(path, ranks))
        return FirstWeights(checkpoint=path)
    if is_lightning_file(path):
        return FirstWeights(file=LightningWeights(path, ranks))
    _check_is_no_folder_of_checkpoints(path)
    if not any(path.glob("model.safetensors*")):
        refuse_deepspeed_checkpoint("weights", path)
    return FirstWeights(file=WeightsFile(path))


def restore_first_weights(run: Run) -> None:
    """Load the initial weights of the model of ``run`` if a checkpoint contains them.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not match the model.
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
        problem = "is not a checkpoint, but a folder that contains checkpoints"
        raise RoomierError("weights", str(path), problem, f"Pass one of them. The newest is {newest}")
    if (path / RECORD_OF_DCP).is_file():
        _peek(path)  # raises an error that describes a sharded checkpoint


def _peek(path: Path) -> dict[str, Any]:
    try:
        return peek_run(path)
    except CheckpointError as error:
        raise CheckpointError("weights", str(path), error.problem, error.action) from error
