"""Training with a context size, and in a plain loop in one process."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from roomier import Callback, Module, Trainer
from tests.context.networks import CASTS, NETWORKS, OWN, Batch, batch_of, loss_of
from tests.parallel.parity import Distance, Trained, bare_optimizer, whole_weights
from tests.parallel.test_trainer import Rows

SEED = 5  # of the random numbers in training


@dataclass(frozen=True)
class Case:
    """Settings of a fit.

    Args:
        levers: further arguments of the Trainer.
        dimension: name of the setting whose value is ``size``.
        of_strategy: further settings of the strategy.
        is_sum: True if the loss is a sum over the terms.
        skipped_from: first micro-batch that a hook skips, and with it the rest of the epoch.
        is_lightning: True to fit a LightningModule.
    """

    network: str
    strategy: str = "zero2"
    num_ranks: int = 2
    size: int = 2
    length: int = 19
    accumulate: int = 2
    micro_batch: int = 2
    num_steps: int = 5
    shard_size: int | None = None
    is_sum: bool = False
    skipped_from: int | None = None
    is_lightning: bool = False
    precision: str = "64-true"
    levers: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    dimension: str = "context_parallel_size"
    of_strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def step_samples(self) -> int:
        return self.num_ranks // self.size * self.accumulate * self.micro_batch

    @property
    def has_norms(self) -> bool:
        """Return whether the norms are recorded. They require the gradients of all parameters before the update, and
        their callback changes the memory that other callbacks measure."""
        return "step_in_backward" not in self.levers and not self.callbacks

    @property
    def num_complete_steps(self) -> int:
        return self.num_steps if self.skipped_from is None else self.skipped_from // self.accumulate

    def samples(self) -> Batch:
        return batch_of(self.network, self.step_samples * self.num_steps, self.length, seed=5)


class Fitted(Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.network = NETWORKS[case.network]()
        self.loss_reduction = "sum" if case.is_sum else "mean"
        self.read: list[Batch] = []
        with torch.no_grad():
            for each in self.network.parameters():
                if each.dim() > 1:
                    each.mul_(2)

    def terms(self, batch: Batch) -> int:
        """Return the number of loss terms. Causal models of Hugging Face ignore the first label."""
        first = int(self.case.network not in (*OWN, "gpt", "gpt dropout", "bert padded"))
        return int((batch["labels"][:, first:] != -100).sum())

    def num_loss_terms(self, batch: Any) -> int:
        return self.terms(batch)

    def loss(self, batch: Batch) -> Tensor:
        loss = loss_of(self.case.network, self.network, batch)
        return loss * self.terms(batch) if self.case.is_sum else loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.read.append(batch)
        return self.loss(batch)


class Skipping(Fitted):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if self.case.skipped_from is not None and batch_idx >= self.case.skipped_from else None


def on_lightning(fitted: Fitted) -> Any:
    """Return a LightningModule that calls ``fitted``."""
    import lightning  # late import: takes seconds

    class OnLightning(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fitted = fitted

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.fitted.loss(batch)

        def num_loss_terms(self, batch: Batch) -> int:
            return self.fitted.terms(batch)

    return OnLightning()


class Norms(Callback):
    """Record of the norms of the gradients before clipping."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        norm = trainer.engine.clip(math.inf, "norm")
        self.norms += [] if norm is None else [float(norm)]


class Samples(Dataset[Batch]):
    def __init__(self, case: Case) -> None:
        self.samples = case.samples()

    def __len__(self) -> int:
        return len(self.samples["input_ids"])

    def __getitem__(self, index: int) -> Batch:
        return {name: value[index] for name, value in self.samples.items()}


def fit(case: Case) -> Trained:
    """Fit on each rank of a group."""
    return fit_module(case)[0]


def fit_module(case: Case) -> tuple[Trained, Fitted]:
    module, rows, norms = Fitted(case) if case.skipped_from is None else Skipping(case), Rows(), Norms()
    strategy: dict[str, Any] = {"name": case.strategy, case.dimension: case.size, **case.of_strategy}
    if case.shard_size is not None:
        strategy["shard_size"] = case.shard_size
    torch.manual_seed(SEED)
    fitted = on_lightning(module) if case.is_lightning else module
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy,
            devices=case.num_ranks,
            **{
                "accelerator": "cpu",
                "precision": case.precision,
                "accumulate_grad_batches": case.accumulate,
                "gradient_clip_val": 0.05,
                "optimizer": {"name": "adamw", "lr": 3e-3, "eps": 1e-3},
                "max_epochs": 1,
                "logger": rows,
                "log_every_n_steps": 1,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": folder,
                **case.levers,
            },
            callbacks=[*([norms] if case.has_norms else []), *case.callbacks],
        )
        trainer.fit(fitted, DataLoader(Samples(case), batch_size=case.micro_batch))
    assert trainer.global_step == case.num_complete_steps
    return Trained(rows.losses, norms.norms, whole_weights(module)), module


def is_equal(case: Case, apart: Distance) -> bool:
    """Return whether two runs are equal except for rounding. The padded models compute their loss in float32."""
    bound = 1e-5 if case.precision == "32-true" else 1e-7 if case.network in CASTS else 1e-10
    of_losses = max(bound, 1e-6) if "padded" in case.network else bound
    return max(apart.losses, apart.norms) < of_losses and apart.weights < bound


def train_bare(case: Case) -> Trained:
    """Train in one process with one batch per step."""
    bare = Fitted(case)
    bare = bare.double() if case.precision == "64-true" else bare
    optimizer, trained = bare_optimizer("adamw", bare), Trained([], [], {})
    samples = case.samples()
    for step in range(case.num_complete_steps):
        batch = {name: each[step * case.step_samples :][: case.step_samples] for name, each in samples.items()}
        optimizer.zero_grad()
        loss = bare.loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(bare.parameters(), 0.05).item()
        trained.norms += [norm] if case.has_norms else []
        optimizer.step()
        trained.losses.append(loss.item())
    trained.weights = {name: each.detach() for name, each in bare.named_parameters()}
    return trained
