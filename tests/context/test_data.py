"""Ranks that share sequences read, count, predict and store each sample once, and a run resumes with another context
size."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from roomier import Callback, Module, Trainer
from roomier.callbacks import EarlyStopping, ModelCheckpoint, PredictionWriter, SpikeGuard, Throughput
from roomier.tuner import lr_find
from tests.context.networks import NETWORKS, Batch, batch_of, loss_of
from tests.parallel.test_trainer import Rows
from tests.ranks.pool import RankFailed, RankPool

NUM_SAMPLES, STEP_SAMPLES, LENGTH = 16, 4, 19
Layout = tuple[str, int, int]  # strategy, number of ranks, context size


class Indexed(Dataset[Batch]):
    def __init__(self) -> None:
        self.samples = batch_of("gpt", NUM_SAMPLES, LENGTH, seed=5)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Batch:
        return {"index": torch.tensor(index), **{name: each[index] for name, each in self.samples.items()}}


class Reads(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = NETWORKS["gpt"]()
        self.read: list[int] = []
        self.total, self.val_total = SumMetric(), SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        index = batch.pop("index")
        self.read += index.tolist()
        self.total.update(index)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("num_samples", float(len(index)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss_of("gpt", self.network, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        index = batch.pop("index")
        self.val_total.update(index)
        self.log("val_total", self.val_total)
        self.log("val_loss", loss_of("gpt", self.network, batch), batch_size=self.num_loss_terms(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> list[int]:
        return batch["index"].tolist()

    def num_loss_terms(self, batch: Any) -> int:
        return int((batch["labels"] != -100).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3)


class Killed(Callback):
    """Sends SIGKILL to a rank in the sixth step, or raises an error there."""

    def __init__(self, rank: int, *, raises: bool = False) -> None:
        self.rank, self.raises = rank, raises

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:  # type: ignore[override]
        if trainer.global_step == 5 and trainer.global_rank == self.rank:
            if self.raises:
                raise ValueError(f"rank {self.rank} cannot continue")
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(layout: Layout, root: Path, max_steps: int, logger: Any, callbacks: Sequence[Any]) -> Trainer:
    strategy, num_ranks, size = layout
    chosen: Any = {"name": strategy, "context_parallel_size": size}
    if strategy == "hsdp":
        chosen["shard_size"] = size
    return Trainer(
        **({"strategy": chosen, "devices": num_ranks} if num_ranks > 1 else {}),
        accelerator="cpu",
        seeding="events",
        accumulate_grad_batches=STEP_SAMPLES * size // num_ranks,
        gradient_clip_val=0.05,
        max_steps=max_steps,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=1,
        default_root_dir=root,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(layout: Layout, root: Path, max_steps: int, resumes: bool, *callbacks: Any) -> Any:
    """Fit, validate and predict. Return the samples, losses and values on this rank."""
    module, rows = Reads(), Rows()
    trainer = trainer_of(layout, root, max_steps, rows, [ModelCheckpoint(every_n_train_steps=2), *callbacks])
    torch.manual_seed(0)
    training = DataLoader(Indexed(), batch_size=1, shuffle=True)
    others = DataLoader(Indexed(), batch_size=3)
    trainer.fit(module, training, others, ckpt_path="last" if resumes else None)
    names = ("total", "num_samples", "val_total", "val_loss")
    logged = {name: float(trainer.callback_metrics.get(name, -1)) for name in names}
    predicted = [index for each in trainer.predict(module, others) for index in each]
    return module.read, rows.losses, logged, predicted


PAIRS: list[tuple[Layout, Layout]] = [
    (("zero3", 4, 2), ("single", 1, 1)),
    (("single", 1, 1), ("zero2", 2, 2)),
    (("ddp", 2, 2), ("zero3", 4, 4)),
    (("zero1", 4, 2), ("hsdp", 4, 2)),
    (("hsdp", 4, 2), ("zero3", 2, 1)),
    (("zero2", 2, 1), ("ddp", 4, 2)),
    (("zero3", 2, 2), ("zero3", 4, 2)),
    (("zero3", 4, 4), ("ddp", 2, 1)),
    (("ddp", 4, 1), ("zero1", 2, 2)),
    (("zero2", 4, 4), ("zero1", 4, 4)),
    (("hsdp", 4, 2), ("single", 1, 1)),
    (("single", 1, 1), ("ddp", 4, 4)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=pytest.mark.more if i < 1 else pytest.mark.slow) for i, pair in enumerate(PAIRS)],
)
def test_a_run_resumes_with_another_context_size(
    on_ranks: RankPool, tmp_path: Path, before: Layout, after: Layout
) -> None:
    def run(layout: Layout, folder: str, max_steps: int, resumes: bool = False) -> Any:
        _, num_ranks, size = layout
        found = on_ranks(num_ranks, train, layout, tmp_path / folder, max_steps, resumes, joins=num_ranks > 1)
        assert all(each[0] == found[rank // size * size][0] for rank, each in enumerate(found))
        assert all(each[2:] == found[0][2:] for each in found)
        return sorted(index for each in found[::size] for index in each[0]), *found[0][1:]

    read, losses, logged, _ = run(("single", 1, 1), "whole", 8)
    first = run(before, "resumed", 2)
    rest = run(after, "resumed", 8, resumes=True)
    assert sorted(first[0] + rest[0]) == read == sorted([*range(NUM_SAMPLES)] * 2)
    assert first[1] + rest[1] == pytest.approx(losses, rel=1e-5)
    assert rest[2] == pytest.approx(logged, rel=1e-5)
    assert (rest[2]["total"], rest[2]["num_samples"]) == (sum(range(NUM_SAMPLES)), NUM_SAMPLES)
    assert rest[3] == list(range(NUM_SAMPLES))


@pytest.mark.more
@pytest.mark.parametrize("raises", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_resumes_after_a_rank_of_a_group_has_failed(on_ranks: RankPool, tmp_path: Path, raises: bool) -> None:
    layout: Layout = ("zero2", 4, 2)
    read, losses, logged, _ = on_ranks(1, train, ("single", 1, 1), tmp_path / "whole", 8, False, joins=False)[0]
    with pytest.raises(RankFailed, match="rank 3 cannot continue" if raises else "SIGKILL") as failed:
        on_ranks(4, train, layout, tmp_path / "resumed", 8, False, Killed(3, raises=raises), timeout_s=60)
    assert failed.value.rank == 3
    assert len(failed.value.reports) == 4  # the other ranks end, too
    rest = on_ranks(4, train, layout, tmp_path / "resumed", 8, True)
    assert sorted(index for each in rest[::2] for index in each[0]) == sorted(read[4 * STEP_SAMPLES :])
    assert rest[0][1] == pytest.approx(losses[4:], rel=1e-5)
    assert rest[0][2] == pytest.approx(logged, rel=1e-5)


REDUCTIONS = ("mean", "sum", "min", "max")


group_of_data_ranks: dict[int, Any] = {}  # a module with a process group cannot be copied for a dry run


class Logs(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = MetricCollection({"highest": MaxMetric(), "average": MeanMetric(), "sum": SumMetric()})
        self.forwarded = MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        value = batch["index"].double().sum()
        for name in REDUCTIONS:
            self.log(name, value, reduce_fx=name, on_step=True, on_epoch=True, sync_dist=True)
        self.log("of_group", value, sync_dist=True, sync_dist_group=group_of_data_ranks.get(0))
        self.forwarded(value)
        self.log("forwarded", self.forwarded, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        value = batch["index"].double().sum()
        for name in REDUCTIONS:
            self.log(f"val_{name}", value, reduce_fx=name)
        self.metrics.update(value)
        self.log_dict(self.metrics)
        super().validation_step(batch, batch_idx)


class Everything(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        super().log_metrics(metrics, step)
        self.rows.append((step, dict(metrics)))


class Clock(Callback):
    """Records the times at which batches end, before or after another callback."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.monotonic())


def observe(layout: Layout, root: Path) -> Any:
    """Return the logged rows, the values of callbacks, the predictions and their files."""
    _, num_ranks, size = layout
    module, rows, clocks = Logs(), Everything(), (Clock(), Clock())
    if num_ranks > 1:  # ranks that together read each sample once
        groups = [dist.new_group([*range(first, num_ranks, size)]) for first in range(size)]
        group_of_data_ranks[0] = groups[dist.get_rank() % size]
    stopping = EarlyStopping("val_mean", stopping_threshold=100.0)
    guard = SpikeGuard(action="skip", monitor=("loss", "grad_norm"))
    writer = PredictionWriter(root / "files", "batch_and_epoch", overwrite=True)
    trainer = trainer_of(layout, root, 8, rows, [clocks[0], Throughput(), clocks[1], guard, stopping, writer])
    loader = DataLoader(Indexed(), batch_size=3)
    trainer.fit(module, DataLoader(Indexed(), batch_size=1, shuffle=True), loader)
    predicted = list(trainer.predict_stream(module, loader)), trainer.predict(module, loader)
    files = {path.name: torch.load(path) for path in (root / "files").iterdir()}
    values = {name: float(each) for name, each in trainer.callback_metrics.items()}
    return rows.rows, values, predicted, files, trainer.global_step, [clock.times for clock in clocks]


@pytest.mark.more
def test_values_and_predictions_count_each_sample_once(on_ranks: RankPool, tmp_path: Path) -> None:
    alone = on_ranks(1, observe, ("single", 1, 1), tmp_path / "1", joins=False)[0]
    two = on_ranks(2, observe, ("zero2", 2, 1), tmp_path / "2")[0]
    four = on_ranks(4, observe, ("zero2", 4, 2), tmp_path / "4")
    for _, values, predicted, files, num_steps, _ in four:
        assert values == pytest.approx(two[1], rel=1e-5)
        assert {name: values[name] for name in alone[1]} == pytest.approx(alone[1], rel=1e-5)
        assert predicted == alone[2] == two[2]
        assert files == two[3]
        assert num_steps == alone[4] == NUM_SAMPLES // STEP_SAMPLES
    rows, *_, (before, after) = four[0]
    for (step, row), (other_step, other) in zip(rows, two[0], strict=True):
        assert (step, row.keys()) == (other_step, other.keys())
        for name in [name for name in row if not name.endswith("_per_s")]:
            assert row[name] == pytest.approx(other[name], rel=1e-5), name
    rates = next(row for step, row in rows if step == 3 and "samples_per_s" in row)
    least_s, most_s = before[5] - after[3], after[5] - before[3]  # each step has two micro-batches on each rank
    for name, number in ("samples_per_s", STEP_SAMPLES), ("tokens_per_s", STEP_SAMPLES * LENGTH):
        assert rates[name] * least_s <= number <= rates[name] * most_s


class Drawn(Sampler[int]):
    """Sampler that draws its order from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_SAMPLES).tolist())

    def __len__(self) -> int:
        return NUM_SAMPLES


def find_rate(layout: Layout, root: Path) -> tuple[float, ...]:
    """Return the losses of a learning rate search in an unseeded run."""
    module = Reads()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    trainer = trainer_of(layout, root, 8, False, [])
    curve = lr_find(trainer, module, DataLoader(Indexed(), batch_size=1, sampler=Drawn()), num_training=12)
    assert curve is not None
    return curve.raw_losses


@pytest.mark.more
def test_a_group_searches_a_learning_rate_like_one_process(on_ranks: RankPool, tmp_path: Path) -> None:
    (wanted,) = on_ranks(1, find_rate, ("zero2", 1, 1), tmp_path, joins=False)
    for losses in on_ranks(2, find_rate, ("zero2", 2, 2), tmp_path):
        assert losses == pytest.approx(wanted, rel=1e-5)
