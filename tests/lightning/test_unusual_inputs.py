"""Loaders, hooks, optimizers and limits that Lightning accepts. Weights and results are compared with Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from roomier import DataModule, RoomierError, Trainer
from roomier.core.errors import DataError
from roomier.techniques.optim.closures import assumes_closure
from tests.lightning.both import quiet_lightning
from tests.lightning.modules import Regression, in_order, pl, samples
from tests.lightning.rows import run_with

pytestmark = pytest.mark.more


class Restarts:
    """An iterator that restarts when ``iter`` is called."""

    def __init__(self, num_batches: int = 4) -> None:
        self.batches, self.index = list(in_order(num_batches)), 0

    def __iter__(self) -> Restarts:
        self.index = 0
        return self

    def __next__(self) -> Any:
        if self.index == len(self.batches):
            raise StopIteration
        self.index += 1
        return self.batches[self.index - 1]


class Continues(Restarts):
    """An iterator that does not restart."""

    def __iter__(self) -> Restarts:
        return self


class WithoutHooks(Regression):
    """Module that sets hooks, a step and a loader to None."""

    on_train_start = on_train_epoch_end = on_validation_start = validation_step = None
    prepare_data = setup = teardown = configure_callbacks = on_save_checkpoint = None
    val_dataloader = None

    def train_dataloader(self) -> Any:
        return in_order()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, which requires a closure and calls it twice."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "requires a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        offsets = [0.05 * each.grad for each in parameters]
        for each, offset in zip(parameters, offsets, strict=True):
            each.add_(offset)
        closure()
        for each, offset in zip(parameters, offsets, strict=True):
            each.sub_(offset).sub_(each.grad, alpha=self.param_groups[0]["lr"])
        return loss


class WithSam(Regression):
    def configure_optimizers(self) -> Any:
        return Sam(self.parameters())


class SumsBatches(Regression):
    """Module that sums the losses of all batches in a nested collection of batches."""

    def loss(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return sum(self.loss(each) for each in batch.values())
        if isinstance(batch[0], (list, tuple)):
            return sum(self.loss(each) for each in batch)
        return super().loss(batch)


def dict_of_lists() -> dict[str, Any]:
    return {"a": [in_order(3), in_order(2, 7)], "b": in_order(3, 8)}


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (Regression, lambda t, m: t.fit(m, Restarts(), Restarts(2))),
        (WithoutHooks, lambda t, m: t.fit(m)),
        (WithoutHooks, lambda t, m: t.fit(m, in_order(), in_order(2))),
        (WithSam, lambda t, m: t.fit(m, in_order(), in_order(2))),
        (SumsBatches, lambda t, m: t.fit(m, dict_of_lists())),
        (SumsBatches, lambda t, m: t.fit(m, [in_order(2), [in_order(3), in_order(1)]])),
    ],
)
def test_fits_equal_lightnings(make: Any, call: Any, tmp_path: Path) -> None:
    modules = []
    for kind in (Trainer, pl.Trainer):
        torch.manual_seed(1)
        modules.append(make())
        trainer, _, _ = run_with(kind, call, lambda: modules[-1], tmp_path)
        assert trainer.global_step >= 4
    for own, other in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


def test_evaluation_of_a_dict_of_lists(tmp_path: Path) -> None:
    class Counts(SumsBatches):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("value", self.loss(batch))

    results = [
        run_with(kind, lambda t, m: t.validate(m, dict_of_lists(), verbose=False), Counts, tmp_path)[1]
        for kind in (Trainer, pl.Trainer)
    ]
    assert len(results[0]) == 3
    for own, other in zip(*results, strict=True):
        assert own == pytest.approx(other, rel=1e-6)


def test_an_iterator_that_does_not_restart_is_rejected(make_trainer: Callable[..., Trainer]) -> None:
    with pytest.raises(DataError, match="can be iterated only once"):
        make_trainer(max_epochs=2).fit(Regression(), Continues())
    with pytest.raises(DataError, match="can be iterated only once"):
        make_trainer(max_epochs=2).fit(Regression(), iter(in_order(4)))


def test_a_resumed_run_reads_a_loader_that_restarts(tmp_path: Path) -> None:
    def trainer(**keywords: Any) -> Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return Trainer(default_root_dir=tmp_path, accelerator="cpu", **quiet, **keywords)  # type: ignore[arg-type]

    def module() -> Regression:
        torch.manual_seed(1)
        return Regression()

    whole, half, resumed = module(), module(), module()
    trainer(max_epochs=3).fit(whole, Restarts())
    first = trainer(max_steps=6)
    first.fit(half, Restarts())
    first.save_checkpoint(tmp_path / "half")
    trainer(max_epochs=3).fit(resumed, Restarts(), ckpt_path=tmp_path / "half")
    for own, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, other)


def test_hooks_of_data_modules_and_callbacks_can_be_none(make_trainer: Callable[..., Trainer]) -> None:
    calls: list[str] = []

    class Data(DataModule):
        prepare_data = setup = teardown = val_dataloader = None  # type: ignore[assignment]

        def train_dataloader(self) -> Any:
            calls.append("data")
            return in_order(2)

    class LightningData(pl.LightningDataModule):
        prepare_data = setup = teardown = val_dataloader = state_dict = None

        def train_dataloader(self) -> Any:
            calls.append("lightning data")
            return in_order(2)

    class Hooks(roomier.Callback):
        setup = teardown = on_train_start = on_exception = None  # type: ignore[assignment]

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            calls.append("end")

    class LightningHooks(pl.Callback):
        setup = teardown = on_train_start = on_save_checkpoint = None

    class Own(roomier.Module):
        on_train_start = val_dataloader = configure_callbacks = None  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    for module, data in ((Own(), Data()), (Regression(), LightningData())):
        trainer = make_trainer(max_epochs=1, callbacks=[Hooks(), LightningHooks()])
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == 2
        copy.deepcopy(module)
    assert calls == ["data", "end", "lightning data", "end"]


def test_a_step_that_is_none_is_rejected(make_trainer: Callable[..., Trainer]) -> None:
    class NoStep(Regression):
        training_step = None

    with pytest.raises(RoomierError, match="does not define training_step"):
        make_trainer(max_epochs=1).fit(NoStep(), in_order())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_without_batches_returns_lightnings_value(stage: str, tmp_path: Path) -> None:
    class Steps(Regression):
        test_step = Regression.validation_step

    limit = {f"limit_{ {'validate': 'val'}.get(stage, stage) }_batches": 0}
    results = [
        run_with(kind, lambda t, m: getattr(t, stage)(m, in_order()), Steps, tmp_path, **limit)[1]
        for kind in (Trainer, pl.Trainer)
    ]
    assert results[0] == results[1] == (None if stage == "predict" else [])


class Checked(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class Returns(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        return super().step(closure())


class Conditional(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        super().step(closure)
        return loss


class Raises(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("requires a closure")
        return super().step(closure)


class CallsInside(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            for _ in range(2):
                loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize(
    ("kind", "assumes"),
    [
        (Sam, True),
        (Raises, True),
        (CallsInside, True),
        (Checked, False),
        (Returns, False),
        (Conditional, False),
        (torch.optim.SGD, False),
        (torch.optim.AdamW, False),
    ],
)
def test_optimizers_that_require_a_closure(kind: type, assumes: bool) -> None:
    assert assumes_closure(kind) is assumes


def test_an_optimizer_that_requires_a_closure_is_rejected_with_accumulation(
    make_trainer: Callable[..., Trainer],
) -> None:
    with pytest.raises(RoomierError, match="Sam, which evaluates the loss several times per step"):
        make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(WithSam(), in_order())


def test_a_set_of_batches_is_read(make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]) -> None:
    class OneTensor(Regression):
        def loss(self, batch: Any) -> Any:
            return self(batch).square().mean()

    batches = set(samples(3).tensors[0].split(4))
    trainer = make_trainer(max_epochs=2)
    trainer.fit(OneTensor(), batches)
    assert trainer.global_step == 2 * len(batches) == 6
    assert "the order of a set is not defined" in capsys.readouterr().err


def test_callbacks_log_like_lightnings(tmp_path: Path) -> None:
    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("of_step", float(batch_idx), on_step=True, on_epoch=True)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.log_dict({"of_validation": 3.0, "step": float(trainer.global_step)})

    metrics, mine = [], Logs()
    for kind in (pl.Trainer, Trainer):
        trainer, _, _ = run_with(
            kind, lambda t, m: t.fit(m, in_order(), in_order(2)), Regression, tmp_path, callbacks=[mine]
        )
        metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-6)
    assert "of_step_epoch" in metrics[1]
    assert not {"log", "log_dict"} & vars(mine).keys()


def test_callbacks_keep_their_own_log(make_trainer: Callable[..., Trainer]) -> None:
    seen: list[str] = []

    class Own(roomier.Callback):
        def log(self, text: str) -> None:  # type: ignore[override]
            seen.append(text)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.log("end")
            assert callable(self.log_dict)

    make_trainer(max_epochs=1, callbacks=[Own()]).fit(Regression(), in_order())
    assert seen == ["end"]


@pytest.mark.parametrize(("text", "seed"), [(None, 0), ("17", 17)])
def test_seed_everything_without_a_seed(text: str | None, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if text is not None:
        monkeypatch.setenv("PL_GLOBAL_SEED", text)
    assert roomier.seed_everything() == seed
    drawn = torch.rand(3)
    with quiet_lightning():
        assert pl.seed_everything(verbose=False) == seed
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("text", ["seven", "-1", str(2**32)])
def test_an_invalid_seed_in_the_environment_is_rejected(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", text)
    with pytest.raises(RoomierError, match=f"PL_GLOBAL_SEED='?{text}'?: must be an integer"):
        roomier.seed_everything()
