"""Collectives over rows of tensors, and the count of the bytes that were sent."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.exchange import Exchange, all_reduce_bytes
from tests.ranks.pool import RankPool


def swap_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    exchange, rank = Exchange(), dist.get_rank()
    rows = (torch.arange(exchange.num_ranks * 5).view(-1, 5) + 40 * rank).to(dtype)
    received = exchange.all_to_all(rows)
    gathered = torch.zeros_like(rows)
    gathered[rank] = 7 + rank
    exchange.all_gather(gathered)
    return received, gathered, exchange.bytes_sent


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_rows_are_received_and_counted(on_ranks: RankPool, num_ranks: int, dtype: torch.dtype) -> None:
    for rank, (received, gathered, bytes_sent) in enumerate(on_ranks(num_ranks, swap_rows, dtype)):
        own = torch.arange(5) + 5 * rank
        assert torch.equal(received, torch.stack([own + 40 * source for source in range(num_ranks)]).to(dtype))
        assert torch.equal(gathered[:, 0], (7 + torch.arange(num_ranks)).to(dtype))
        assert bytes_sent == 2 * (num_ranks - 1) * 5 * dtype.itemsize


def test_without_a_process_group_each_call_is_the_identity() -> None:
    exchange = Exchange()
    rows = torch.ones(1, 3)
    assert torch.equal(exchange.all_to_all(rows), rows)
    exchange.all_gather(rows)
    assert (exchange.num_ranks, exchange.rank, exchange.bytes_sent) == (1, 0, 0)


def test_bytes_of_an_all_reduce() -> None:
    assert [all_reduce_bytes(1000, num_ranks) for num_ranks in (1, 2, 4)] == [0, 1000, 1500]
