"""A callback changes each gradient before clipping: the same result as a plain loop in every mode of the updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier import RoomierError
from roomier.core.errors import TrainingError
from roomier.models.gpt import GPT, GPTConfig
from tests.covering import few
from tests.parallel.parity import whole_weights
from tests.ranks.pool import RankPool

NUM_STEPS, NUM_ROWS = 4, 4
OPTIMIZER = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.0}


class GradientCentralization(roomier.Callback):
    """Subtract from each row of a gradient its mean (Yong et al. 2020, arXiv 2004.01461, equation 1)."""

    def on_gradient(self, trainer: Any, pl_module: roomier.Module, name: str, gradient: Tensor) -> None:
        if gradient.dim() > 1:
            gradient -= gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True)


class Language(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(GPTConfig(vocab_size=23, context=12, num_layers=3, num_heads=3, width=15, dropout=0.0))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.network(batch[:, :-1], batch[:, 1:])[1]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **OPTIMIZER)  # type: ignore[arg-type]


def rows() -> Tensor:
    return torch.randint(23, (NUM_STEPS * NUM_ROWS, 13), generator=torch.Generator().manual_seed(3))


def bare(clip: dict[str, Any]) -> dict[str, Tensor]:
    module = Language()
    optimizer = module.configure_optimizers()
    for batch in rows().split(NUM_ROWS):
        optimizer.zero_grad()
        module.training_step(batch).backward()
        for each in module.parameters():
            if each.dim() > 1 and each.grad is not None:
                each.grad -= each.grad.mean(dim=1, keepdim=True)
        if clip.get("gradient_clip_algorithm") == "value":
            nn.utils.clip_grad_value_(module.parameters(), clip["gradient_clip_val"])
        elif clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip["gradient_clip_val"])
        optimizer.step()
    return dict(module.named_parameters())


def fit(num_ranks: int = 1, accumulate: int = 1, **options: Any) -> dict[str, Tensor]:
    module = Language()
    trainer = roomier.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=num_ranks,
        accumulate_grad_batches=accumulate,
        callbacks=[GradientCentralization()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=NUM_ROWS // num_ranks // accumulate))
    assert trainer.global_step == NUM_STEPS
    return whole_weights(module)


def check_same(found: dict[str, Tensor], clip: dict[str, Any]) -> None:
    # The kernels of a fused optimizer and sums over ranks or micro-batches round differently. With eps=1e-3, a relative
    # difference of 1e-6 in the gradients of 4 steps changes a weight by about 4 * lr * 1e-6.
    torch.testing.assert_close(found, bare(clip), rtol=0, atol=1e-6)


CLIPPING = [{"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}]
MODES: list[dict[str, Any]] = [
    {},
    {"accumulate": 2},
    {"step_in_backward": True},
    *({"offload": {"optimizer_states": "disk", "update": update}} for update in ("plain", "deferred", "speculative")),
    {"offload": {"parameters": "disk"}},
    {"offload": {"parameters": "disk"}, "accumulate": 2},
    {"offload": {"parameters": "disk", "optimizer_states": "disk", "update": "deferred"}},
]


@pytest.mark.parametrize("clip", few(CLIPPING, 2))
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_changes_before_clipping_in_each_mode(mode: dict[str, Any], clip: dict[str, Any]) -> None:
    check_same(fit(**mode, **clip), clip)


@pytest.mark.parametrize(
    "mode",
    few(
        [
            {"strategy": "zero2", "step_in_backward": True},
            {"strategy": "zero1", "accumulate": 2},
            {"strategy": "ddp"},
            {"strategy": "zero3"},
            {"strategy": "zero2", "offload": {"optimizer_states": "disk", "update": "speculative"}},
            {"strategy": "zero3", "offload": {"optimizer_states": "disk", "parameters": "disk"}},
        ]
    ),
    ids=str,
)
def test_changes_on_ranks(on_ranks: RankPool, mode: dict[str, Any]) -> None:
    calls = [(2, mode.get("accumulate", 1), {**mode, **clip}) for clip in CLIPPING]
    for clip, by_rank in zip(CLIPPING, on_ranks.each(2, fit_on_ranks, calls), strict=True):
        check_same(by_rank[0], clip)


def fit_on_ranks(num_ranks: int, accumulate: int, options: dict[str, Any]) -> dict[str, Tensor]:
    return fit(num_ranks, accumulate, **{name: each for name, each in options.items() if name != "accumulate"})


@pytest.mark.more
def test_step_without_a_loss_does_not_change_the_gradients_of_the_previous_step_again() -> None:
    """Deferred updates wait for the next forward pass, which a skipped batch does not have."""
    import lightning  # late import: a LightningModule counts steps without a loss, and its import takes seconds

    class Skipping(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Language()

        def training_step(self, batch: Tensor, index: int) -> Tensor | None:
            return None if index == 1 else self.model.training_step(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.model.configure_optimizers()

    class Doubling(roomier.Callback):
        def on_gradient(self, trainer: Any, pl_module: roomier.Module, name: str, gradient: Tensor) -> None:
            gradient *= 2

    found = []
    for update in ("plain", "deferred"):
        module = Skipping()
        roomier.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[Doubling()],
            offload={"optimizer_states": "disk", "parameters": "disk", "update": update},
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        ).fit(module, torch.utils.data.DataLoader(rows(), batch_size=NUM_ROWS))
        found.append({name: each.detach().clone() for name, each in module.named_parameters()})
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class SparseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(23, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x + self.table(tokens)).tanh()
        return found


class SparseTables(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SparseLayer() for _ in range(3))

    def training_step(self, batch: Tensor) -> Tensor:
        x = torch.zeros(*batch.shape, 4)
        for each in self.layers:
            x = each(batch, x)
        return x.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_sparse_gradients_are_changed_once_although_they_stay_on_the_device(precision: str) -> None:
    class Doubling(roomier.Callback):
        def on_gradient(self, trainer: Any, pl_module: roomier.Module, name: str, gradient: Tensor) -> None:
            gradient *= 2

    found = []
    for offload in (None, {"parameters": "disk"}):
        module = SparseTables()
        options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        roomier.Trainer(max_epochs=1, precision=precision, callbacks=[Doubling()], offload=offload, **options).fit(
            module, rows().split(NUM_ROWS)
        )
        found.append({name: each.detach().clone() for name, each in module.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_loss_scale_is_removed_before_the_change() -> None:
    class Small(roomier.Callback):
        """Record the largest element."""

        largest = 0.0

        def on_gradient(self, trainer: Any, pl_module: roomier.Module, name: str, gradient: Tensor) -> None:
            self.largest = max(self.largest, float(gradient.abs().max()))

    small = Small()
    options = {"max_steps": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    roomier.Trainer(precision="16-mixed", callbacks=[small], **options).fit(Language(), [rows()[:NUM_ROWS]])
    assert 0 < small.largest < 1  # the scale is 65,536


def test_manual_optimization_and_hooks_of_the_module() -> None:
    class Manual(Language):
        automatic_optimization = False

        def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()

        def on_gradient(self, name: str, gradient: Tensor) -> None:
            assert dict(self.named_parameters())[name].shape == gradient.shape
            gradient.zero_()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Manual()
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    roomier.Trainer(max_epochs=1, **options).fit(module, rows().split(NUM_ROWS))
    torch.testing.assert_close(module.state_dict(), Language().state_dict(), rtol=0, atol=0)


def test_change_that_needs_all_gradients_names_the_alternative() -> None:
    callback = roomier.callbacks.LambdaCallback(on_before_optimizer_step=lambda *_: None)
    trainer = roomier.Trainer(max_steps=1, accelerator="cpu", step_in_backward=True, callbacks=[callback])
    with pytest.raises(RoomierError, match="Change each gradient in on_gradient instead"):
        trainer.fit(Language(), [rows()])


class Unconfigured(Language):
    configure_optimizers = roomier.Module.configure_optimizers


def one_bit() -> None:
    with pytest.raises(TrainingError, match=r"on_gradient=.*is not supported with onebit_adam"):
        roomier.Trainer(
            max_steps=1,
            strategy="ddp",
            devices=2,
            accelerator="cpu",
            optimizer={"name": "onebit_adam", "freeze_step": 1},
            callbacks=[GradientCentralization()],
            logger=False,
            enable_checkpointing=False,
        ).fit(Unconfigured(), torch.utils.data.DataLoader(rows(), batch_size=2))


def test_gradients_of_one_rank_cannot_be_changed(on_ranks: RankPool) -> None:
    on_ranks(2, one_bit)
