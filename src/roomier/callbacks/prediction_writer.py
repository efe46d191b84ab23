"""PredictionWriter: callback that writes predictions to files during ``predict``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError
from roomier.core.keywords import explain_unknown_keywords
from roomier.core.paths import check_path
from roomier.core.replacing import replacing_path
from roomier.core.tree import map_tensors

_INTERVALS = ("batch", "epoch", "batch_and_epoch")
_PLAIN = (str, int, float, bool, type(None))


class PredictionWriter(Callback):
    """Callback that writes the results of ``predict_step`` to files.

    With ``trainer.predict(..., return_predictions=False)``, predictions do not accumulate in memory. ``write_interval``
    selects the files:

    - ``"batch"``: one file per batch, ``predictions-<loader>-<batch>.pt``, written when the batch ends. The batch index
      counts the batches of all ranks, so the names do not depend on the number of ranks.
    - ``"epoch"``: one file per rank, ``predictions-rank-<rank>.pt``, with ``{"predictions": ..., "batch_indices":
      ...}``. Each rank keeps its predictions in host memory until ``predict`` ends.

    Each file is written under a temporary name and then renamed, so a file is always complete. Read the file with
    ``torch.load(path, weights_only=True)``. The file contains tensors (on the CPU), numbers, strings, and nested dicts,
    lists and tuples of these values.

    To write a different format, override :meth:`write_on_batch_end` or :meth:`write_on_epoch_end`, which have the same
    arguments as in Lightning's ``BasePredictionWriter``.

    Args:
        output_dir: folder for the files; created if it does not exist.
        write_interval: ``"batch"``, ``"epoch"``, or ``"batch_and_epoch"`` for both.
        overwrite: if True, remove prediction files of an earlier run from the folder when ``predict`` starts.

    Raises:
        RoomierError: an argument is invalid. The error is also raised when ``predict`` starts if the folder already
            contains predictions. After a batch, the error is raised if a prediction contains an object that is neither
            a tensor nor a plain value.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[PredictionWriter("predictions")])
        >>> trainer.predict(model, loader, return_predictions=False)
    """

    reads_parameters = False

    @explain_unknown_keywords("callbacks.PredictionWriter")
    def __init__(
        self, output_dir: str | Path | None = None, write_interval: str = "batch", *, overwrite: bool = False
    ) -> None:
        if output_dir is not None:
            check_path("PredictionWriter(output_dir)", output_dir)
        if write_interval not in _INTERVALS:
            raise _wrong("write_interval", write_interval, "is unknown", f"Use one of: {', '.join(_INTERVALS)}")
        methods = [f"write_on_{each}_end" for each in write_interval.split("_and_")]
        as_files = [each for each in methods if getattr(type(self), each) is getattr(PredictionWriter, each)]
        if output_dir is None and as_files:
            raise _wrong("output_dir", None, "is missing", f"Pass a folder for the files, or override {as_files[0]}")
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.interval = write_interval
        self.overwrite = overwrite

    def on_predict_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if self.output_dir is not None:
            trainer.ranks.on_zero(self._make_folder)
            self.output_dir.mkdir(parents=True, exist_ok=True)  # ranks on other machines may not share the folder

    def _make_folder(self) -> None:
        assert self.output_dir is not None
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _wrong(
                "output_dir", str(self.output_dir), f"cannot be created: {error.strerror}", "Use another folder"
            ) from error
        existing = sorted(self.output_dir.glob("predictions-*.pt"))
        if existing and not self.overwrite:
            problem = f"already contains {len(existing)} files with predictions, such as {existing[0].name}"
            raise _wrong("output_dir", str(self.output_dir), problem, "Use another folder, or set overwrite=True")
        for path in existing:
            path.unlink()

    def on_predict_batch_end(
        self,
        trainer: TrainerView,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if "batch" in self.interval and trainer.ranks.peers.is_zero:
            indices = trainer.predict_loop.current_batch_indices
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if "epoch" in self.interval and trainer.ranks.peers.is_zero:
            loop = trainer.predict_loop
            self.write_on_epoch_end(trainer, pl_module, loop.predictions, loop.epoch_batch_indices)

    def write_on_batch_end(
        self,
        trainer: TrainerView,
        pl_module: Module,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the ``prediction`` of one batch.

        Args:
            batch_indices: indices of the samples in the dataset; empty if they are unknown.
            batch_idx: index of the batch on this rank; ``trainer.predict_loop.current_batch_number`` is its index among
                the batches of all ranks.
        """
        assert self.output_dir is not None
        number = trainer.predict_loop.current_batch_number
        _save(prediction, self.output_dir / f"predictions-{dataloader_idx}-{number:06d}.pt")

    def write_on_epoch_end(
        self, trainer: TrainerView, pl_module: Module, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all ``predictions`` of this rank. ``predictions`` has one item per batch, or one list per loader."""
        assert self.output_dir is not None
        content = {"predictions": list(predictions), "batch_indices": list(batch_indices)}
        _save(content, self.output_dir / f"predictions-rank-{trainer.data_rank}.pt")


def _save(content: Any, path: Path) -> None:
    plain = map_tensors(lambda tensor: tensor.detach().cpu().clone(), content)
    _check_plain(plain, path.name)
    try:
        with replacing_path(path) as aside:
            torch.save(plain, aside)
    except OSError as error:
        raise _wrong(
            "output_dir", str(path), f"cannot be written: {error.strerror}", "Free some space, or use another folder"
        ) from error


def _check_plain(value: Any, name: str) -> None:
    # Files with other types cannot be loaded without executing code.
    if type(value) is Tensor or type(value) in _PLAIN:
        return
    if type(value) is dict:
        children = [*value.keys(), *value.values()]
    elif type(value) in (list, tuple):
        children = list(value)
    else:
        problem = f"cannot be written to {name}"
        action = (
            "Return only tensors, numbers, strings, dicts or lists from predict_step, or override write_on_batch_end"
        )
        raise _wrong("predict_step", type(value).__name__, problem, action)
    for each in children:
        _check_plain(each, name)


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"PredictionWriter({field})", received, problem, action)
