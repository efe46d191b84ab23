"""``fit(weights=...)``: what a model begins with, from safetensors files or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.log import notice
from roomier.engine.weights_file import WeightsFile
from roomier.train.restore import restore_weights
from roomier.train.run import Run

_RECORD_OF_CHECKPOINT = "run.json"


@dataclass(frozen=True)
class FirstWeights:
    """One of the two, or neither.

    Args:
        file: read by the engine when it is built. checkpoint: read when the run is there.
    """

    file: WeightsFile | None = None
    checkpoint: Path | None = None

    def restore(self, run: Run) -> None:
        """Fill the model from the checkpoint, if it is one.

        Raises:
            CheckpointError: damaged, or of another model.
        """
        if self.checkpoint is None:
            return
        try:
            restore_weights(run, self.checkpoint)
        except CheckpointError as error:
            raise CheckpointError("weights", str(self.checkpoint), error.problem, error.action) from error


def first_weights(weights: object, ckpt_path: Path | None) -> FirstWeights:
    """What ``weights`` means.

    Args:
        weights: path of a safetensors file, of a folder of them, or of a checkpoint; or None.
        ckpt_path: the run goes on from it, so ``weights`` is not read.

    Raises:
        RoomierError: it is no path, or there is nothing of the kind.
    """
    if weights is None:
        return FirstWeights()
    if not isinstance(weights, (str, Path)):
        action = "Pass a .safetensors file, a folder with model.safetensors, or a checkpoint"
        raise RoomierError("weights", weights, "is not a path", action)
    if ckpt_path is not None:
        notice(f"weights={str(weights)!r} is not read: the run goes on from {ckpt_path}")
        return FirstWeights()
    if (Path(weights) / _RECORD_OF_CHECKPOINT).is_file():
        return FirstWeights(checkpoint=Path(weights))
    return FirstWeights(file=WeightsFile(weights))
