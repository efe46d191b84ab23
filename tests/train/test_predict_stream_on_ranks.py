"""A stream of predictions that one rank leaves, or never iterates, ends on all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.core.errors import RoomierError
from roomier.train import predict_stream

pytestmark = pytest.mark.more

X_NC = torch.arange(20.0).reshape(10, 2)


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        self.layer(batch[0])
        return int(batch[0][0, 0]) // 8  # index of the batch among the batches of all ranks


def trainer() -> roomier.Trainer:
    return roomier.Trainer(
        accelerator="cpu",
        strategy="zero3",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )


def loaders() -> list[DataLoader[tuple[Tensor, ...]]]:
    """Return two loaders with 3 and 1 batches: 2 rounds and 1 round."""
    return [DataLoader(TensorDataset(X_NC[:num]), batch_size=4) for num in (10, 4)]


def taken(num_wanted: tuple[int, int]) -> tuple[list[int], str, bool]:
    """Return the items that this rank received before it left the stream, the error, and whether a run is open."""
    mine, problem = trainer(), ""
    stream = mine.predict_stream(Net(), loaders())
    got: list[int] = []
    try:
        while len(got) < num_wanted[mine.global_rank]:
            got.append(next(stream))
        stream.close()
    except RoomierError as error:
        problem = str(error)
    return got, problem, mine.is_running


ALL = [0, 1, 2, 0]
LEFT = (
    "predict_stream='ranks [{}]': left the stream before its end, but this rank requests another prediction. "
    "Iterate to the end of the stream on all ranks, or leave the stream at the same prediction."
)


def left_by_one_rank() -> None:
    # The rank leaves before the first round, within it, after it, between two loaders, or after the last round.
    for num_of_leaver, num_of_other in ((0, 0), (1, 2), (2, 2), (3, 3), (4, 4)):
        for leaver in (0, 1):
            result = taken((num_of_leaver, 9) if leaver == 0 else (9, num_of_leaver))
            if dist.get_rank() == leaver:
                assert result == (ALL[:num_of_leaver], "", False)
            else:
                assert result == (ALL[:num_of_other], LEFT.format(leaver), False)


def test_rank_that_leaves_a_stream_early_is_named_by_the_others(on_ranks: Any) -> None:
    on_ranks(2, left_by_one_rank)


def left_in_one_round() -> None:
    for num_wanted in ((0, 0), (1, 2), (3, 3), (4, 4)):
        assert taken(num_wanted) == (ALL[: num_wanted[dist.get_rank()]], "", False)
    assert list(trainer().predict_stream(Net(), loaders())) == ALL


def test_ranks_may_leave_a_stream_in_the_same_round(on_ranks: Any) -> None:
    on_ranks(2, left_in_one_round)


KEPT: list[Any] = []


def taken_by_the_first_alone() -> str:
    predict_stream.REPORT_AFTER_S = predict_stream.GIVE_UP_AFTER_S = 0.0
    mine = trainer()
    stream = mine.predict_stream(Net(), loaders())
    if mine.is_global_zero:
        with pytest.raises(RoomierError) as caught:
            next(stream)
        return str(caught.value)
    KEPT.append(stream)  # without a reference, the stream would be closed
    return ""


def test_ranks_that_never_iterate_are_reported_and_then_named(
    on_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, _ = on_ranks(2, taken_by_the_first_alone)
    assert problem.startswith("predict_stream='ranks [1]': have requested no prediction for 0 s, but this rank waits")
    assert "predict_stream: rank 0 waits for ranks [1] to request the next prediction" in capsys.readouterr().out
