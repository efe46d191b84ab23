"""Shuffled streams and mixtures: order, position, resume on other numbers of ranks."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import roomier
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import DataError
from roomier.data import Mixture, ShuffleBuffer
from tests.ranks.pool import RankPool


class Numbers(IterableDataset[int]):
    """Stream of numbers with a position.

    Attributes:
        num_read: how many numbers have been read by all iterators.
    """

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end, self.num_read = first, end, 0
        self.next = self._begin = first

    def __iter__(self) -> Iterator[int]:
        begin, self._begin = self._begin, self.first
        for number in range(begin, self.end):
            self.next = number + 1
            self.num_read += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = state["next"]


class WithoutState(IterableDataset[int]):
    def __init__(self, end: int) -> None:
        self.end = end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.end))


def shuffled(stream: Any = None, size: int = 10, seed: int = 3) -> ShuffleBuffer:
    return ShuffleBuffer(Numbers(0, 47) if stream is None else stream, size, seed)


def mixed() -> Mixture:
    return Mixture([shuffled(Numbers(0, 1000), 7), Numbers(1000, 2000), WithoutState(5000)], [0.5, 0.2, 0.3], 1)


def test_each_epoch_has_all_samples_in_another_order() -> None:
    stream, orders = shuffled(), []
    for epoch in range(3):
        stream.set_epoch(epoch)
        orders.append(list(stream))
    assert all(sorted(order) == list(range(47)) for order in orders)
    assert all(sorted(order[:10]) == list(range(10)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    again = shuffled()
    again.set_epoch(1)
    assert list(again) == orders[1]
    assert list(shuffled(seed=4)) != orders[0]


@pytest.mark.parametrize("make", [shuffled, mixed, lambda: shuffled(WithoutState(47))])
@pytest.mark.parametrize("num_done", [0, 1, 9, 10, 11, 40, 46])
def test_a_position_continues_exactly(make: Any, num_done: int) -> None:
    stream, other = make(), make()
    stream.set_epoch(2)
    whole = list(islice(stream, 47))
    stream.set_epoch(2)
    reading = iter(stream)
    assert list(islice(reading, num_done)) == whole[:num_done]
    state = stream.state_dict()
    other.load_state_dict(state)
    other.set_epoch(2)
    assert other.state_dict() == state
    assert list(islice(other, 47 - num_done)) == whole[num_done:]
    assert list(islice(reading, 47 - num_done)) == whole[num_done:]


def test_a_resume_reads_at_most_one_block_again() -> None:
    stream = shuffled(Numbers(0, 100), size=10)
    list(islice(stream, 57))
    resumed = Numbers(0, 100)
    other = shuffled(resumed, size=10)
    other.load_state_dict(stream.state_dict())
    next(iter(other))
    assert resumed.num_read == 10


def test_a_mixture_has_its_weights() -> None:
    mixture = Mixture([WithoutState(10**6), Numbers(-(10**6), 0)], [3, 1])
    num_negative = sum(each < 0 for each in islice(mixture, 4000))
    assert 900 < num_negative < 1100
    assert len(list(Mixture([WithoutState(5), WithoutState(10**6)], [1, 1]))) < 40


def test_wrong_settings_are_rejected() -> None:
    with pytest.raises(DataError, match="size=0: must be at least 1"):
        shuffled(size=0)
    for weights in ([1], [1, 0], [1, -1]):
        with pytest.raises(DataError, match="must contain a positive number for each stream"):
            Mixture([[], []], weights)
    for name, other in (("size", shuffled(size=11)), ("seed", shuffled(seed=4))):
        with pytest.raises(DataError, match=f"{name}=.*was .* in the saved run"):
            other.load_state_dict(shuffled().state_dict())


class Seen(roomier.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.path = path

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.path.open("a") as file:
            file.write("".join(f"{number}\n" for number in batch.tolist()))
        out: Tensor = self.layer(batch[:, None].float() / 100).square().mean()
        return out

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(root: Path, num_ranks: int, max_steps: int) -> None:
    rank = torch.distributed.get_rank() if num_ranks > 1 else 0
    trainer = roomier.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        default_root_dir=root / "runs",
        max_steps=max_steps,
        max_epochs=1,
        callbacks=[ModelCheckpoint(every_n_train_steps=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(shuffled(Numbers(0, 120), 16), batch_size=2)
    trainer.fit(Seen(root / f"seen-{max_steps}-{rank}"), loader, ckpt_path="last")


@pytest.mark.parametrize("num_ranks", [*(pytest.param(each, marks=pytest.mark.more) for each in (1, 2)), 3])
def test_a_run_on_two_ranks_resumes_on_any_number(num_ranks: int, on_ranks: RankPool, tmp_path: Path) -> None:
    on_ranks(2, train, tmp_path, 2, 5)
    train(tmp_path, 1, -1) if num_ranks == 1 else on_ranks(num_ranks, train, tmp_path, num_ranks, -1)
    seen = Counter(int(line) for path in tmp_path.glob("seen-*") for line in path.read_text().split())
    num_dropped = (120 - 20) // 2 % num_ranks * 2
    assert len(seen) == 120 - num_dropped
    assert set(seen.values()) == {1}
