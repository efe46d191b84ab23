"""A small training step in a bare PyTorch loop, in a Trainer, and in Lightning's Trainer if Lightning is installed. The
time of the step is mostly the overhead of the loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import muted
from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.trainer import Trainer

MODEL_TEXT = "Linear(32, 32), ReLU, Linear(32, 2); batch 16, fp32, cross entropy, AdamW(fused=True), CPU, one thread"

Batch = tuple[Tensor, Tensor]
Probe = Callable[[int], None]
"""Function that is called at the start of each ``training_step``, with the index of the step."""


def toy_network() -> nn.Module:
    """Return the network, with 32 inputs and 2 outputs."""
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def toy_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer for ``network``."""
    return torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)


def toy_batches(num_steps: int) -> list[Batch]:
    """Return ``num_steps`` references to one batch: ``(16, 32)`` inputs, ``(16,)`` classes."""
    return [(torch.randn(16, 32), torch.randint(0, 2, (16,)))] * num_steps


def run_bare(batches: list[Batch], probe: Probe, *, device: torch.device | None = None) -> None:
    """Train with the loop from the PyTorch tutorials. If ``device`` is None, the loop runs on the CPU and does not move
    batches."""
    network = toy_network() if device is None else toy_network().to(device)
    optimizer = toy_optimizer(network)
    for index, (x, y) in enumerate(batches):
        probe(index)
        if device is not None:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def module_of(base: Any) -> Any:
    """Return a class with the toy training step.

    Args:
        base: the Module of roomier or of Lightning.
    """

    class ToyModule(base):  # type: ignore[misc]
        """Module that runs the toy training step.

        Args:
            probe: function that is called at the start of each step.
            num_logged: number of ``self.log`` calls per step.
        """

        def __init__(self, probe: Probe, num_logged: int = 0) -> None:
            super().__init__()
            self.network = toy_network()
            self.probe = probe
            self.logged_names = [f"metric_{index}" for index in range(num_logged)]

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.probe(batch_idx)
            x, y = batch
            loss = F.cross_entropy(self.network(x), y)
            for name in self.logged_names:
                self.log(name, loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return toy_optimizer(self.network)

    return ToyModule


def run_trainer(
    batches: list[Batch],
    probe: Probe,
    *,
    num_logged: int = 0,
    callbacks: list[Callback] | None = None,
    accelerator: str = "cpu",
) -> dict[str, Any]:
    """Run ``Trainer.fit`` over ``batches`` with default settings, in a temporary folder.

    Returns:
        The callbacks, loggers and log interval of the Trainer.
    """
    with TemporaryDirectory() as folder, muted():
        trainer = Trainer(max_epochs=1, default_root_dir=Path(folder), callbacks=callbacks, accelerator=accelerator)
        trainer.fit(module_of(Module)(probe, num_logged), batches)
        return {
            "callbacks": [type(each).__name__ for each in trainer.callbacks],
            "loggers": [type(each).__name__ for each in trainer.loggers],
            "log_every_n_steps": trainer.log_every_n_steps,
        }


class Lightning:
    """The installed Lightning package, for comparisons. roomier does not depend on Lightning.

    Args:
        name: name of the package.

    Attributes:
        version: version of the package.
        import_line: the statement that imports the Trainer.
        fit: the ``fit`` method, without wrappers.
        package: the package, whose frames are counted.
    """

    def __init__(self, name: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.package = import_module(name)
            self._pytorch = import_module("lightning.pytorch") if name == "lightning" else self.package
        for logger in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        self.version = str(self.package.__version__)
        self.import_line = f"from {self._pytorch.__name__} import Trainer"
        self.fit = getattr(self._pytorch.Trainer.fit, "__wrapped__", self._pytorch.Trainer.fit)
        self._module = module_of(self._pytorch.LightningModule)

    def run(self, batches: list[Batch], probe: Probe, *, num_logged: int = 0, num_callbacks: int = 0) -> None:
        """Train in Lightning's Trainer, as :func:`run_trainer` does in roomier's Trainer.

        Args:
            batches: the batches.
            probe: function that is called at the start of each step.
            num_logged: number of ``self.log`` calls per step.
            num_callbacks: number of callbacks without overridden hooks.
        """
        callbacks = [self._pytorch.Callback() for _ in range(num_callbacks)]
        with TemporaryDirectory() as folder, muted(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = self._pytorch.Trainer(
                max_epochs=1, default_root_dir=folder, accelerator="cpu", devices=1, callbacks=callbacks
            )
            trainer.fit(self._module(probe, num_logged), _AsGiven(batches))

    def run_adapted(self, batches: list[Batch], probe: Probe, *, num_logged: int = 0) -> None:
        """Train the same LightningModule in roomier's Trainer."""
        with TemporaryDirectory() as folder, muted():
            trainer = Trainer(max_epochs=1, default_root_dir=folder, accelerator="cpu", devices=1)
            trainer.fit(self._module(probe, num_logged), batches)


def load_lightning() -> Lightning | None:
    """Return the installed Lightning package, under either of its names; None if Lightning is not installed."""
    name = next((each for each in ("lightning", "pytorch_lightning") if find_spec(each) is not None), None)
    return None if name is None else Lightning(name)


class _AsGiven:
    """Iterable over the given batches. An iterable is the fastest kind of loader that Lightning accepts."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
