"""``trainer.strategy``: the ranks and the device, with Lightning's names."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roomier import checkpoint
from roomier.core.all_gather import all_gather
from roomier.core.errors import RoomierError
from roomier.trainer.lightning.loops import root_device

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView

_OF_TRAINER = (
    *("world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "is_global_zero"),
    *("model", "lightning_module", "optimizers"),
)
"""Attributes that have the values of the Trainer's attributes of the same names."""
_REDUCTIONS = ("mean", "avg", "sum", "max", "min")


class Strategy:
    """View of the ranks and the device of a Trainer, for Lightning's callbacks and modules.

    All methods except ``all_gather`` send values through host memory. Use these methods for metrics and decisions, not
    for the tensors of a step. Every rank must make the same calls in the same order.

    Args:
        trainer: Trainer whose ranks and device are shown.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    def __repr__(self) -> str:
        return f"Strategy({self.name!r}, world_size={self.world_size})"

    @property
    def name(self) -> str:
        """Strategy of the plan, such as ``"single"``, ``"ddp"`` or ``"zero3"``."""
        return self._trainer.plan.parallel.strategy

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        return root_device(self._trainer)

    @property
    def is_distributed(self) -> bool:
        """True if there are several ranks."""
        return self._trainer.world_size > 1

    @property
    def _lightning_optimizers(self) -> list[Any]:
        """Attribute that ``LightningModule.optimizers`` reads after a run."""
        return list(self._trainer.manual_optimizers)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TRAINER:
            return getattr(self._trainer, name)
        raise AttributeError(f"trainer.strategy has no attribute {name!r}")

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this method."""
        self._trainer.ranks.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return ``obj`` of rank ``src`` on every rank."""
        ranks = self._trainer.ranks
        if src == 0:
            return ranks.from_zero(obj, allows_pickle=True)
        return ranks.gather(obj, allows_pickle=True)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Reduce ``tensor``, which can have any shape, across all ranks. Return any other object unchanged.

        Args:
            tensor: tensor to reduce, or any other object.
            group: ignored. All ranks take part.
            reduce_op: ``"mean"``, ``"avg"``, ``"sum"``, ``"max"`` or ``"min"``. None means ``"mean"``.

        Raises:
            RoomierError: ``reduce_op`` is unknown.
        """
        word = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if word not in _REDUCTIONS:
            raise RoomierError("reduce_op", reduce_op, "is unknown", f"Use one of: {', '.join(_REDUCTIONS)}")
        if not isinstance(tensor, Tensor) or self._trainer.ranks.is_alone:
            return tensor
        of_all = torch.stack(self._trainer.ranks.gather(tensor.detach().cpu()))
        if word in ("mean", "avg"):
            reduced = of_all.sum(0) / len(of_all)
        elif word == "sum":
            reduced = of_all.sum(0)
        else:
            reduced = of_all.amax(0) if word == "max" else of_all.amin(0)
        return reduced.to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if ``decision`` is True on all ranks, or on any rank if ``all`` is False."""
        decisions = self._trainer.ranks.gather(bool(decision))
        return min(decisions) if all else max(decisions)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all ranks, so that shape ``(...)`` becomes ``(ranks, ...)``. Dicts and lists may be
        nested.

        Equivalent of :meth:`roomier.Module.all_gather`. With one rank, tensors are returned unchanged.
        """
        return all_gather(tensor, self._trainer.ranks, self.root_device, group, has_gradients=sync_grads)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """On rank 0, remove the checkpoint at ``filepath`` if it exists."""
        self._trainer.ranks.on_zero(partial(_remove, Path(filepath)))


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        os.unlink(path)
    elif path.exists():
        checkpoint.remove(path)  # rejects other folders
