"""A small module that draws from every generator, and a bitwise comparison of the checkpoints of two runs."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from roomier import Module, Trainer, checkpoint
from roomier.core.device.rng import seed_everything

NUM_SAMPLES = 22  # 11 batches of 2, so that the last window of 4 is smaller


class Net(Module):
    """Module with batch norm, dropout and noise, which logs a mean, a maximum and a value per step.

    Args:
        configure: function of the module that returns the result of ``configure_optimizers``.
        loss_scale: function of the batch index that returns a factor of the loss, to create infinite losses.
    """

    def __init__(self, configure: Callable[[nn.Module], Any] | None = None, loss_scale: Any = None) -> None:
        super().__init__()
        self.configure = configure or (lambda net: torch.optim.AdamW(net.parameters(), lr=0.01))
        self.loss_scale = loss_scale or (lambda batch_idx: 1.0)
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1, bias=False)
        )

    def loss(self, x: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand())
        return (self.layers(x + 0.1 * torch.randn_like(x)) - noise).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * self.loss_scale(batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Noisy(Dataset[Tensor]):
    """Samples with random augmentation from the three generators that a dataset can use."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.samples = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index] + torch.rand(3) + float(np.random.rand()) + random.random()


def differing(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Yield the places in which two nested states are not bit-identical."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        bits_a, bits_b = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
        if not (same_kind and torch.equal(bits_a, bits_b)):
            yield f"{where}: {a} != {b}"
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if key in a and key in b:
                yield from differing(a[key], b[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}: only in one of the two"
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            yield f"{where}: {len(a)} items != {len(b)}"
        for index, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from differing(left, right, f"{where}[{index}]")
    elif type(a) is not type(b) or not (a == b or (a != a and b != b)):
        yield f"{where}: {a!r} != {b!r}"


class Runs:
    """Runs in separate folders. Every fit has a new Trainer, module and loader, and a different seed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seed = 0

    def fit(
        self,
        folder: str,
        make_module: Callable[[], nn.Module],
        make_loader: Callable[[], Any],
        make_val: Callable[[], Any] | None = None,
        ckpt_path: str | Path | None = None,
        **options: Any,
    ) -> Trainer:
        """Start a new run under ``folder``, or resume the existing run (``ckpt_path="last"``)."""
        # After a resume, random numbers whose state is not restored from the checkpoint differ.
        seed_everything(self.next_seed() if (self.root / folder).exists() else 1)
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
        trainer = Trainer(default_root_dir=self.root / folder, accelerator="cpu", **{**quiet, **options})
        trainer.fit(make_module(), make_loader(), make_val() if make_val else None, ckpt_path=ckpt_path)
        return trainer

    def next_seed(self) -> int:
        self.seed += 1000
        return self.seed

    def last_state(self, folder: str) -> dict[str, Any]:
        """Return the state in the newest checkpoint under ``folder``."""
        path = checkpoint.find_last(self.root / folder)
        assert path is not None
        return checkpoint.load(path)

    def rows(self, folder: str) -> list[dict[str, Any]]:
        """Return the rows of ``metrics.jsonl`` without wall-clock times."""
        (path,) = (self.root / folder).glob("version_*/metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [{name: value for name, value in row.items() if name != "time"} for row in rows]

    def differences(self, a: str, b: str, *, with_ledger: bool = True) -> list[str]:
        """Return the places in which the newest checkpoints of two runs are not bit-identical.

        Args:
            with_ledger: True to also compare the ledger of ModelCheckpoint. A stopped run has an additional checkpoint.
        """
        states = [self.last_state(folder) for folder in (a, b)]
        for callbacks in (state["callbacks"] for state in states):
            for key in [key for key in callbacks if key.startswith("ModelCheckpoint")]:
                # Runs have different folders. Removed checkpoints are no longer listed after a resume.
                del callbacks[key]["dirpath"], callbacks[key]["superseded"]
                if not with_ledger:
                    del callbacks[key]
        return list(differing(*states))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def net() -> type[Net]:
    return Net


@pytest.fixture
def noisy() -> type[Noisy]:
    return Noisy


@pytest.fixture
def shuffled() -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(), batch_size=2, shuffle=True)


@pytest.fixture
def val_batches() -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(6), batch_size=2)
