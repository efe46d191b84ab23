"""``strategy="auto"`` in a fit: the run equals a run with the chosen plan, and planning has no side effects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import roomier
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import DataError, RoomierError
from roomier.core.ranks import Ranks
from roomier.plan import Plan
from roomier.planner.choosing.pricing import Pricing
from roomier.planner.hardware import this_machine
from roomier.train.settling.settle import settle
from roomier.trainer.session import request_of
from tests.covering import few

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "optimizer": "adamw",
    "learning_rate": 1e-2,
}


class Noisy(Dataset[Any]):
    """Samples with noise from the global generators and from a generator of the dataset."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.num_reads = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return index + torch.randn(4) + torch.randn(4, generator=self.generator)


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.seen.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch).square().mean())


class Late(Net):
    """Module that creates its layers in ``configure_model``."""

    def __init__(self) -> None:
        roomier.Module.__init__(self)
        self.seen = []
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(8):
            yield torch.randn(4)


def batches() -> list[torch.Tensor]:
    return [torch.full((2, 4), float(number)) for number in range(8)]


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "own sampler": lambda: DataLoader(
        Noisy(), batch_size=4, sampler=torch.utils.data.RandomSampler(range(16), num_samples=12)
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "list": batches,
    "generator": lambda: iter(batches()),
}


def run(loader: Any, make: Any = Net, **keywords: Any) -> tuple[list[float], list[torch.Tensor], Plan, torch.Tensor]:
    """Return the losses of a fit, its weights, its plan, and the random state after the fit."""
    roomier.seed_everything(7)
    module = make()
    trainer = roomier.Trainer(**{**QUIET, "max_epochs": 1, **keywords})
    trainer.fit(module, loader)
    weights = [each.detach().clone() for each in module.parameters()]
    return torch.stack(module.seen).tolist(), weights, trainer.plan, torch.get_rng_state()


def by_name(plan: Plan) -> dict[str, Any]:
    """Return the arguments for the chosen strategy and memory techniques."""
    return {
        "strategy": plan.parallel.strategy,
        "chunked_loss": plan.loss.chunked,
        "step_in_backward": plan.optimizer.step_in_backward == "exact",
        "accumulate_grad_batches": plan.batch.accumulate_grad_batches,
    }


@pytest.mark.parametrize("kind", few(LOADERS))
def test_run_equals_a_run_with_the_chosen_plan_bit_for_bit(kind: str) -> None:
    losses, weights, plan, state = run(LOADERS[kind](), strategy="auto")
    assert plan.parallel.strategy == "single"
    losses_by_name, weights_by_name, _, state_by_name = run(LOADERS[kind](), **by_name(plan))
    assert losses == losses_by_name
    assert all(map(torch.equal, weights, weights_by_name))
    assert torch.equal(state, state_by_name)


@pytest.mark.more
@pytest.mark.slow
def test_run_with_workers_equals_a_run_with_the_chosen_plan() -> None:
    def loader() -> Any:
        return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)

    losses, weights, plan, _ = run(loader(), strategy="auto")
    losses_by_name, weights_by_name, _, _ = run(loader(), **by_name(plan))
    assert losses == losses_by_name
    assert all(map(torch.equal, weights, weights_by_name))


def test_configure_model_is_planned() -> None:
    losses, weights, plan, _ = run(LOADERS["shuffled"](), make=Late, strategy="auto")
    losses_by_name, weights_by_name, _, _ = run(LOADERS["shuffled"](), make=Late, **by_name(plan))
    assert losses == losses_by_name
    assert all(map(torch.equal, weights, weights_by_name))


def test_reading_a_batch_does_not_change_the_dataset(make_trainer: Any) -> None:
    data = Noisy()
    trainer = make_trainer(strategy="auto", optimizer="adamw", max_steps=1)
    trainer.fit(Net(), DataLoader(data, batch_size=4))
    assert data.num_reads == 4 * trainer.plan.batch.accumulate_grad_batches * trainer.choice.chosen.micro_batch // 4


class Wide(Net):
    """Weights, gradients and states use 4 MiB, and the activations of one sample use 64 KiB."""

    def __init__(self) -> None:
        roomier.Module.__init__(self)
        self.net = nn.Sequential(nn.Linear(4, 8192), nn.Tanh(), nn.Linear(8192, 4), nn.Tanh(), nn.Linear(4, 2))
        self.seen = []


def test_memory_budget_splits_micro_batches_and_keeps_the_global_batch(capfd: Any) -> None:
    data = TensorDataset(torch.randn(128, 4))

    class OfTuples(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    losses, _, plan, _ = run(DataLoader(data, batch_size=64), make=OfTuples, strategy="auto", memory_budget="3MiB")
    printed = capfd.readouterr().err
    accumulated = plan.batch.accumulate_grad_batches
    assert accumulated > 1
    assert len(losses) == 2 * accumulated
    assert "strategy='auto' chose single" in printed
    assert f"{accumulated} x {64 // accumulated} samples" in printed
    whole, _, _, _ = run(DataLoader(data, batch_size=64), make=OfTuples, strategy="single")
    assert sum(losses[:accumulated]) / accumulated == pytest.approx(whole[0], rel=1e-5)
    assert sum(losses[accumulated:]) / accumulated == pytest.approx(whole[1], rel=1e-4)


def test_a_time_between_validations_counts_no_micro_batches() -> None:
    trainer = roomier.Trainer(**{**QUIET, "strategy": "auto", "max_epochs": 1, "val_check_interval": "00:01:00:00"})
    trainer.fit(Net(), DataLoader(Noisy(), batch_size=4))
    assert not any("counts micro-batches" in each.reason for each in trainer.choice.considered)


@pytest.mark.more
@pytest.mark.parametrize("counting", [{"limit_train_batches": 3}, {"val_check_interval": 2}, {"fast_dev_run": True}])
def test_micro_batches_are_kept_if_a_setting_counts_them(counting: dict[str, Any]) -> None:
    data = DataLoader(Noisy(), batch_size=4)
    trainer = roomier.Trainer(**{**QUIET, "strategy": "auto", "max_epochs": 1, **counting})
    trainer.fit(Net(), data)
    assert trainer.choice is not None
    assert {each.micro_batch for each in trainer.choice.considered if each.forecast} == {4}
    assert any("counts micro-batches" in each.reason for each in trainer.choice.considered)


def test_hooks_that_read_gradients_exclude_step_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Looks(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert all(each.grad is not None for each in self.parameters())

    monkeypatch.setattr(Pricing, "find_fastest", Pricing.price_all)  # otherwise memory techniques are not considered
    trainer = roomier.Trainer(**{**QUIET, "strategy": "auto", "max_steps": 1})
    trainer.fit(Looks(), batches())
    assert trainer.choice is not None
    assert any("cannot access gradients" in each.reason for each in trainer.choice.considered)


def test_noisy_iterator_is_rejected(make_trainer: Any) -> None:
    drawing = (torch.randn(2, 4) for _ in range(4))
    with pytest.raises(DataError, match="can be iterated only once and draws random numbers"):
        make_trainer(strategy="auto", optimizer="adamw").fit(Net(), drawing)


def test_dataset_with_an_iterator_is_rejected_before_it_is_read(make_trainer: Any) -> None:
    class Held(IterableDataset[Any]):
        def __init__(self) -> None:
            self.numbers = iter(range(8))

        def __iter__(self) -> Iterator[Any]:
            return (torch.full((4,), float(number)) for number in self.numbers)

    data = Held()
    with pytest.raises(DataError, match=r"Held\.numbers, which can be iterated only once"):
        make_trainer(strategy="auto", optimizer="adamw").fit(Net(), DataLoader(data, batch_size=2))
    assert next(data.numbers) == 0


def test_manual_optimization_is_rejected_with_a_budget(make_trainer: Any) -> None:
    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(RoomierError, match="strategy='auto': ByHand uses manual optimization"):
        make_trainer(strategy="auto", memory_budget="1GiB").fit(ByHand(), batches())


def test_strategy_over_the_budget_is_rejected_before_the_run(make_trainer: Any) -> None:
    module = Wide()
    with pytest.raises(RoomierError, match=r"memory_budget='1\.0 MiB': single.* needs .*, but the budget is 1\.0 MiB"):
        make_trainer(memory_budget="1MiB", optimizer="adamw", max_steps=1).fit(module, batches())
    assert module.seen == []
    make_trainer(memory_budget="1GiB", optimizer="adamw", max_steps=1).fit(module, batches())
    assert len(module.seen) == 1


def test_evaluation_does_not_plan_but_a_later_fit_does(make_trainer: Any) -> None:
    module, trainer = Net(), make_trainer(strategy="auto", optimizer="adamw", max_steps=1)
    [metrics] = trainer.validate(module, batches())
    assert metrics["loss"] > 0
    assert trainer.choice is None
    trainer.fit(module, batches())
    assert trainer.choice.chosen.plan == trainer.plan


@pytest.mark.more
def test_second_fit_of_the_same_model_keeps_its_plan(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, trainer = Net(), make_trainer(strategy="auto", optimizer="adamw", max_epochs=1)
    trainer.fit(module, DataLoader(Noisy(), batch_size=4))
    first = trainer.choice
    trainer.fit(module, DataLoader(Noisy(), batch_size=4))
    assert trainer.choice is first
    trainer.fit(Net(), DataLoader(Noisy(), batch_size=4))
    assert trainer.choice is not first


def test_plan_is_for_the_machine_of_the_accelerator(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    look = this_machine.this_machine

    def noted(devices: int, num_nodes: int, accelerator: str, folder: str | None = None) -> Any:
        asked.append(accelerator)
        return look(devices, num_nodes, "cpu", folder)

    monkeypatch.setattr(this_machine, "this_machine", noted)
    make_trainer(strategy="auto", optimizer="adamw", max_steps=1, accelerator="cpu").fit(Net(), batches())
    assert set(asked) == {"cpu"}


def test_explicit_strategy_on_one_rank_is_not_planned(make_trainer: Any) -> None:
    trainer = make_trainer(max_steps=1, optimizer="adamw")
    before = trainer.plan
    settled = settle(request_of(trainer, "fit", Net(), {}), None, Ranks())  # type: ignore[arg-type]  # it reads no data
    assert settled.plan is before
    assert trainer.plan is before


# ---- several ranks, checkpoints --------------------------------------------------------------------------------------


def on_two(root: Path, strategy: Any, max_steps: int, ckpt_path: str | None, **more: Any) -> Any:
    module = Net()
    roomier.seed_everything(11)
    torch.nn.init.normal_(module.net[0].weight)
    trainer = roomier.Trainer(
        **{
            **QUIET,
            "devices": 2,
            "strategy": strategy,
            "max_steps": max_steps,
            "default_root_dir": root,
            "enable_checkpointing": True,
            "callbacks": [ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
            **more,
        }
    )
    trainer.fit(module, DataLoader(Noisy(), batch_size=2, shuffle=True), ckpt_path=ckpt_path)
    trainer.ranks.barrier()  # the process group still works after planning
    stored = trainer.checkpoint_callback
    assert stored is not None
    total = trainer.ranks.sum(torch.stack(module.seen))
    return total.tolist(), trainer.plan.to_dict(), trainer.ranks.gather(trainer.plan.parallel.strategy)


def test_all_ranks_use_one_plan_and_equal_a_run_with_it(on_ranks: Any, tmp_path: Path) -> None:
    (losses, plan, strategies), (_, plan_there, _) = on_ranks(2, on_two, tmp_path / "auto", "auto", 4, None)
    assert plan == plan_there
    assert set(strategies) == {plan["parallel"]["strategy"]}
    chosen = by_name(Plan.from_dict(plan))
    strategy = chosen.pop("strategy")
    (named, _, _), _ = on_ranks(2, on_two, tmp_path / "named", strategy, 4, None, **chosen)
    assert losses == named


class WithData(Net):
    """The loader is created with a collective and with random numbers."""

    def train_dataloader(self) -> Any:
        torch.distributed.barrier()
        return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


def by_choice_and_by_name(root: Path) -> list[list[float]]:
    found = []
    chosen: dict[str, Any] = {"strategy": "auto"}
    for _ in range(2):
        roomier.seed_everything(11)
        module = WithData()
        trainer = roomier.Trainer(**{**QUIET, "devices": 2, "max_steps": 2, "default_root_dir": root, **chosen})
        trainer.fit(module)
        chosen = by_name(trainer.plan)
        found.append(torch.stack(module.seen).tolist())
    return found


@pytest.mark.more
def test_loader_is_created_once_on_all_ranks(on_ranks: Any, tmp_path: Path) -> None:
    for by_choice, named in on_ranks(2, by_choice_and_by_name, tmp_path):
        assert by_choice == named


@pytest.mark.slow
def test_resume_with_auto_is_exact(on_ranks: Any, tmp_path: Path) -> None:
    (whole, _, _), _ = on_ranks(2, on_two, tmp_path / "whole", "auto", 4, None)
    (first, _, _), _ = on_ranks(2, on_two, tmp_path / "cut", "auto", 2, None)
    (rest, _, _), _ = on_ranks(2, on_two, tmp_path / "cut", "auto", 4, "last")
    assert first + rest == whole
