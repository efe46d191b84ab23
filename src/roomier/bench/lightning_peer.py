"""The toy training step in Lightning's Trainer, if Lightning is installed. roomier does not depend on Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from roomier.bench import toy
from roomier.bench.timing import muted
from roomier.trainer import Trainer


@dataclass(frozen=True)
class Lightning:
    """The installed Lightning package, for comparisons.

    Attributes:
        version: version of the package.
        run: function that trains in Lightning's Trainer, as :func:`roomier.bench.toy.run_trainer` does in roomier's
            Trainer. ``num_callbacks`` is the number of callbacks without overridden hooks.
        run_adapted: function that trains the same LightningModule in roomier's Trainer.
        import_line: the statement that imports the Trainer.
        fit: the ``fit`` method, without wrappers.
        packages: packages whose frames are counted.
    """

    version: str
    run: Callable[..., None]
    run_adapted: Callable[..., None]
    import_line: str
    fit: Any
    packages: tuple[ModuleType, ...]


def load() -> Lightning | None:
    """Return the installed Lightning package, under either of its names; None if Lightning is not installed."""
    name = next((each for each in ("lightning", "pytorch_lightning") if find_spec(each) is not None), None)
    if name is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module(name)
        pytorch = import_module("lightning.pytorch") if name == "lightning" else package
    for logger in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    fit = pytorch.Trainer.fit
    run, run_adapted = _runners(pytorch)
    import_line = f"from {pytorch.__name__} import Trainer"
    unwrapped = getattr(fit, "__wrapped__", fit)
    return Lightning(str(package.__version__), run, run_adapted, import_line, unwrapped, (package,))


def _runners(pytorch: ModuleType) -> tuple[Callable[..., None], Callable[..., None]]:
    class PeerModule(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, probe: toy.Probe, num_logged: int) -> None:
            super().__init__()
            self.network = toy.toy_network()
            self.probe = probe
            self.logged_names = [f"metric_{index}" for index in range(num_logged)]

        def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
            self.probe(batch_idx)
            x, y = batch
            loss = F.cross_entropy(self.network(x), y)
            for name in self.logged_names:
                self.log(name, loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return toy.toy_optimizer(self.network)

    def run(batches: list[toy.Batch], probe: toy.Probe, *, num_logged: int = 0, num_callbacks: int = 0) -> None:
        callbacks = [pytorch.Callback() for _ in range(num_callbacks)]
        with TemporaryDirectory() as folder, muted(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pytorch.Trainer(
                max_epochs=1, default_root_dir=folder, accelerator="cpu", devices=1, callbacks=callbacks
            )
            trainer.fit(PeerModule(probe, num_logged), _AsGiven(batches))

    def run_adapted(batches: list[toy.Batch], probe: toy.Probe, *, num_logged: int = 0) -> None:
        with TemporaryDirectory() as folder, muted():
            trainer = Trainer(max_epochs=1, default_root_dir=folder, accelerator="cpu", devices=1)
            trainer.fit(PeerModule(probe, num_logged), batches)

    return run, run_adapted


class _AsGiven:
    """Iterable over the given batches. An iterable is the fastest kind of loader that Lightning accepts."""

    def __init__(self, batches: list[toy.Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
