"""Steps, errors, metrics and checkpoints of a custom loop with an Accelerator."""

from __future__ import annotations

import copy
import csv
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.utils.data import DataLoader

import roomier
from roomier.plan import plan_from_flags
from tests.prepared.scripts import largest_difference
from tests.ranks.pool import RankPool


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 2))


def prepared(accelerator: roomier.Accelerator, num_samples: int = 10) -> tuple[Any, ...]:
    """Return model, optimizer, loader and scheduler."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    loader = DataLoader(torch.arange(3.0 * num_samples).sin().view(num_samples, 3), batch_size=2, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    found: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, scheduler)
    return found


def test_types_and_attributes() -> None:
    accelerator = roomier.Accelerator(cpu=True)
    model, optimizer, loader, scheduler = prepared(accelerator)
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(loader, DataLoader)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert accelerator.prepare(model, optimizer, loader, scheduler) == (model, optimizer, loader, scheduler)
    assert accelerator.prepare("text") == "text"
    assert list(model.state_dict()) == list(network().state_dict())
    assert model.training
    assert not accelerator.unwrap_model(model.eval()).training
    # a scheduler that is created with a prepared optimizer
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert isinstance(accelerator.prepare(later), torch.optim.lr_scheduler.LambdaLR)
    model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()})
    assert all(bool((each == 1).all()) for each in model.parameters())


def test_prepare_returns_the_objects_of_an_accelerator() -> None:
    plan = plan_from_flags(accelerator="cpu", accumulate_grad_batches=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader, scheduler = roomier.prepare(
        model, optimizer, DataLoader(torch.ones(6, 3), batch_size=2), scheduler, plan=plan
    )
    for batch in loader:
        with model.accelerator.accumulate(model):
            model.accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.1 * 0.5**2]  # steps after two micro-batches, and after the last micro-batch
    with pytest.raises(roomier.PlanError, match="max_steps=3"):
        roomier.prepare(model, loader, plan=plan, max_steps=3)
    with pytest.raises(roomier.PlanError, match="Pass each optimizer as a separate argument"):
        roomier.prepare(network(), [torch.optim.SGD(network().parameters())], loader, plan=plan)
    with pytest.raises(roomier.PlanError, match="several optimizers as a list"):
        roomier.prepare(network(), None, "text", plan=plan)  # type: ignore[call-overload]


def test_a_step_that_overflowed_steps_no_scheduler() -> None:
    accelerator = roomier.Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer, _, scheduler = prepared(accelerator)
    skipped = []
    for factor in (0.1, 1e30, 0.1):
        before = copy.deepcopy(model.module.state_dict())
        accelerator.backward(model(torch.ones(2, 3)).sum() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        assert (largest_difference(before, model.module.state_dict()) == 0) == skipped[-1]
    assert skipped == [False, True, False]
    assert scheduler.last_epoch == 2


def test_the_plan_clips_unless_the_script_does() -> None:
    accelerator = roomier.Accelerator(plan=plan_from_flags(accelerator="cpu", gradient_clip_val=0.01))
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    moved = []
    for own_limit in (None, 0.5, None):
        before = model.module.weight.detach().clone()
        accelerator.backward(model(torch.ones(1, 3)).sum())
        if own_limit is not None:
            norm = accelerator.clip_grad_norm_(model.parameters(), own_limit)
            assert float(norm) == pytest.approx(2.0)
        optimizer.step()
        optimizer.zero_grad()
        moved.append(float((model.module.weight.detach() - before).norm()) / 3**0.5 * 2)
    assert moved == pytest.approx([0.01, 0.5, 0.01], rel=1e-3)


def test_onecycle_ends_with_its_last_step() -> None:
    accelerator = roomier.Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(5):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 3


def test_objects_that_do_not_fit() -> None:
    accelerator = roomier.Accelerator(cpu=True)
    one, other = network(), network()
    with pytest.raises(roomier.PlanError, match="contains no parameters of a prepared model"):
        accelerator.prepare(one, torch.optim.SGD(network().parameters(), lr=1.0))
    both = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(roomier.RoomierError, match="has parameters of several models"):
        roomier.Accelerator(cpu=True).prepare(one, other, both)
    with pytest.raises(roomier.PlanError, match="device_placement"):
        accelerator.prepare(network(), device_placement=[False])


def errors_on_ranks() -> list[str]:
    found = []

    def catch(function: Any) -> None:
        with pytest.raises(roomier.RoomierError) as caught:
            function()
        found.append(str(caught.value))

    sharded = roomier.Accelerator(plan=plan_from_flags(strategy="zero3", accelerator="cpu", devices=2))
    model, optimizer, *_ = prepared(sharded)
    catch(lambda: sharded.prepare(network()))
    with torch.inference_mode():
        catch(lambda: model(torch.ones(1, 3)))
    sharded.gradient_accumulation_steps = 2
    with sharded.accumulate(model):
        sharded.backward(model(torch.ones(1, 3)).sum())
        catch(lambda: sharded.clip_grad_norm_(model.parameters(), 1.0))
    once = network()
    stale = list(once.parameters())
    separate = roomier.Accelerator(plan=sharded.plan)
    separate.prepare(once)
    catch(lambda: separate.clip_grad_norm_(stale, 1.0))
    replicated = roomier.Accelerator(cpu=True)
    model, optimizer, *_ = prepared(replicated)
    model(torch.ones(1, 3)).sum().backward()
    catch(optimizer.step)
    catch(lambda: replicated.gather(torch.ones(1 + replicated.process_index)))
    used = network()
    stepped = torch.optim.AdamW(used.parameters())
    used(torch.ones(1, 3)).sum().backward()
    stepped.step()
    another = roomier.Accelerator(plan=plan_from_flags(strategy="zero2", accelerator="cpu", devices=2))
    catch(lambda: another.prepare(used, stepped))
    return found


@pytest.mark.more
def test_errors_on_several_ranks(on_ranks: RankPool) -> None:
    patterns = (
        "one model per Accelerator.*'ddp'",
        r"torch\.no_grad\(\)",
        r"Call accelerator\.clip_grad_norm_\(\.\.\.\) only if accelerator\.sync_gradients is True",
        r"Pass model\.parameters\(\) of the prepared model",
        r"Call accelerator\.backward\(loss\)",
        "pad_across_processes",
        "Call prepare before the first step",
    )
    for messages in on_ranks(2, errors_on_ranks):
        for message, pattern in zip(messages, patterns, strict=True):
            assert re.search(pattern, message), message


def collectives() -> dict[str, Any]:
    accelerator = roomier.Accelerator(cpu=True)
    rank = accelerator.process_index
    accelerator.set_trigger() if rank == 1 else None
    order: list[int] = []
    with accelerator.main_process_first():
        order.append(rank)
    ran = accelerator.on_main_process(lambda: "ran")()
    with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as own:
        pass
    return {
        "sum": accelerator.reduce(torch.tensor([1.0 + rank])).tolist(),
        "mean": accelerator.reduce({"a": torch.tensor(1.0 + rank)}, "mean")["a"].item(),
        "max": accelerator.reduce(torch.tensor([rank, -rank]), "max").tolist(),
        "gather": accelerator.gather((torch.tensor(rank), torch.full((1, 2), rank)))[1].tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(1 + rank), pad_index=7).tolist(),
        "objects": accelerator.gather_for_metrics([f"rank {rank}"]),
        "triggered": [accelerator.check_trigger(), accelerator.check_trigger()],
        "ran": ran,
        "own": own,
        "type": accelerator.distributed_type,
        "counts": (accelerator.num_processes, accelerator.is_main_process, accelerator.is_last_process),
    }


def test_collectives(on_ranks: RankPool) -> None:
    for rank, found in enumerate(on_ranks(2, collectives)):
        assert found == {
            "sum": [3.0],
            "mean": 1.5,
            "max": [1, 0],
            "gather": [[0, 0], [1, 1]],
            "padded": [[1, 7], [1, 1]][rank],
            "objects": ["rank 0", "rank 1"],
            "triggered": [True, False],
            "ran": "ran" if rank == 0 else None,
            "own": [[1, 2], [3, 3]][rank],
            "type": accelerate.DistributedType.MULTI_CPU,
            "counts": (2, rank == 0, rank == 1),
        }


class Manual(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def gradient_of_a_manual_module() -> list[float]:
    torch.manual_seed(0)
    accelerator = roomier.Accelerator(plan=plan_from_flags(strategy="zero2", accelerator="cpu", devices=2))
    module = Manual()
    before = module.layer.weight.detach().clone()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 3), 1.0 + accelerator.process_index)).sum())
    optimizer.step()
    after = accelerator.get_state_dict(model).get("layer.weight")
    return [] if after is None else (before - after).flatten().tolist()


@pytest.mark.more
def test_a_module_with_manual_optimization(on_ranks: RankPool) -> None:
    assert on_ranks(2, gradient_of_a_manual_module)[0] == pytest.approx([1.5] * 3)  # mean over the ranks


class Counter:
    """Object with a state."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def train(folder: Path, strategy: str, num_ranks: int, save_at: int | None, resume: bool) -> list[float]:
    """Return the weights after two epochs. Save in the middle of an epoch, or resume there."""
    torch.manual_seed(0)
    plan = plan_from_flags(strategy=strategy, accelerator="cpu", devices=num_ranks)
    accelerator = roomier.Accelerator(plan=plan)
    model, optimizer, loader, scheduler = prepared(accelerator, 20)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if resume:
        torch.manual_seed(99)
        accelerator.load_state(folder / "saved")
    first_epoch, num_done = divmod(counter.number, len(loader))
    for epoch in range(first_epoch, 2):
        batches = loader
        if epoch == first_epoch and num_done:
            batches = accelerator.skip_first_batches(loader, num_done)
        for batch in batches:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.number += 1
            if counter.number == save_at:
                accelerator.save_state(folder / "saved")
    weights = accelerator.get_state_dict(model)
    return [value for each in weights.values() for value in each.flatten().tolist()]


def test_one_process_resumes_within_an_epoch(tmp_path: Path) -> None:
    whole = train(tmp_path, "single", 1, 13, False)
    assert train(tmp_path, "single", 1, None, True) == whole


def test_ranks_resume_with_another_strategy(on_ranks: RankPool, tmp_path: Path) -> None:
    whole, resumed, other = on_ranks.each(
        2,
        train,
        [(tmp_path, "zero2", 2, 7, False), (tmp_path, "zero2", 2, None, True), (tmp_path, "ddp", 2, None, True)],
    )
    assert resumed[0] == whole[0]
    assert other[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)


def test_load_state_requires_the_same_objects(tmp_path: Path) -> None:
    accelerator = roomier.Accelerator(cpu=True)
    prepared(accelerator)
    accelerator.save_state(tmp_path / "saved")
    prepared(accelerator)
    with pytest.raises(roomier.RoomierError, match="contains 1 schedulers, but 2 were prepared"):
        accelerator.load_state(tmp_path / "saved")
    with pytest.raises(roomier.RoomierError, match=r"output_dir=None.*Pass a folder"):
        accelerator.save_state()


def test_saved_weights(tmp_path: Path) -> None:
    accelerator = roomier.Accelerator(cpu=True)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    model = accelerator.prepare(tied)
    accelerator.save_model(model, tmp_path / "weights", max_shard_size=40)
    assert len(list((tmp_path / "weights").iterdir())) == 3  # two files and their index
    (tmp_path / "weights" / "model_ema.safetensors").touch()  # of the script
    accelerator.save_model(model, tmp_path / "weights")
    names = {each.name for each in (tmp_path / "weights").iterdir()}
    assert names == {"model.safetensors", "model_ema.safetensors"}
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = other[0].weight
    load_model(other, tmp_path / "weights" / "model.safetensors")
    assert largest_difference(other.state_dict(), tied.state_dict()) == 0
    accelerator.save_model(model, tmp_path / "weights", safe_serialization=False)
    accelerator.save(accelerator.get_state_dict(model), tmp_path / "saved.pt")
    accelerator.save(accelerator.get_state_dict(model), tmp_path / "saved.safetensors", safe_serialization=True)
    nn.init.zeros_(other[0].weight)
    load_model(other, tmp_path / "saved.safetensors")
    assert largest_difference(other.state_dict(), tied.state_dict()) == 0
    for path in (tmp_path / "weights" / "pytorch_model.bin", tmp_path / "saved.pt"):
        assert largest_difference(torch.load(path), tied.state_dict()) == 0


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
        self[2].weight = self[0].weight


def save_tied_shards(folder: Path) -> None:
    torch.manual_seed(0)
    accelerator = roomier.Accelerator(plan=plan_from_flags(strategy="zero3", accelerator="cpu", devices=2))
    accelerator.save_model(accelerator.prepare(Tied()), folder)


@pytest.mark.more
def test_tied_shards_are_written_once(on_ranks: RankPool, tmp_path: Path) -> None:
    on_ranks(2, save_tied_shards, tmp_path)
    assert len(load_file(tmp_path / "model.safetensors")) == 3
    torch.manual_seed(0)
    expected, loaded = Tied(), Tied()
    load_model(loaded, tmp_path / "model.safetensors")
    assert largest_difference(loaded.state_dict(), expected.state_dict()) == 0


def test_trackers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = roomier.Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("project", {"rate": 0.1})
    for step in range(2):
        accelerator.log({"loss": torch.tensor(1.0 + step)})
    assert accelerator.get_tracker("csv") in accelerator.trackers
    with pytest.raises(roomier.RoomierError, match="is not a number"):
        accelerator.log({"loss": "text"})
    accelerator.end_training()
    [path] = (tmp_path / "project").glob("*.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [1.0, 2.0]
    accelerator.print("printed")
    assert capsys.readouterr().out == "printed\n"


def test_memory_is_released() -> None:
    accelerator = roomier.Accelerator(cpu=True)
    model, optimizer, *_ = prepared(accelerator)
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    prepared(accelerator)
