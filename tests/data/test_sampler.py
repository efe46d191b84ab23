import random
from itertools import chain

import numpy as np
import pytest
import torch

from roomier.core.errors import DataError
from roomier.core.world import World
from roomier.data import OrderedSampler
from roomier.data.sampler import RoundBatches, WalkedSampler


def order(sampler: OrderedSampler, epoch: int, done: int = 0) -> list[int]:
    sampler.set_position(epoch, done)
    return list(sampler)


def test_order_depends_on_seed_and_epoch_only():
    first = OrderedSampler(50, shuffle=True, seed=7)
    epoch_three = order(first, 3)
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)
        random.seed(global_seed)
        other = OrderedSampler(50, shuffle=True, seed=7)
        order(other, 9)
        assert order(other, 3) == epoch_three
    assert sorted(epoch_three) == list(range(50))
    assert order(first, 4) != epoch_three
    assert order(OrderedSampler(50, shuffle=True, seed=8), 3) != epoch_three


def test_seed_and_epoch_are_not_interchangeable():
    assert order(OrderedSampler(50, shuffle=True, seed=0), 1) != order(OrderedSampler(50, shuffle=True, seed=1), 0)


def test_global_generators_are_unchanged():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    order(OrderedSampler(50, shuffle=True, seed=7), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("done", [0, 1, 17, 20])
def test_position_gives_the_rest_of_the_epoch(shuffle: bool, done: int):
    sampler = OrderedSampler(20, shuffle=shuffle, seed=1)
    assert order(sampler, 2, done) == order(sampler, 2)[done:]
    assert len(sampler) == 20


def test_iterating_twice_gives_the_same():
    sampler = OrderedSampler(20, shuffle=True, seed=1)
    sampler.set_position(0, 5)
    assert list(sampler) == list(sampler)


def test_ranks_share_the_global_order_without_overlap():
    whole = order(OrderedSampler(23, shuffle=True, seed=1), 0)
    ranks = [order(OrderedSampler(23, shuffle=True, seed=1, world=World(rank, 4)), 0) for rank in range(4)]
    assert [len(rank) for rank in ranks] == [5, 5, 5, 5]
    assert [sample for step in zip(*ranks, strict=True) for sample in step] == whole[:20]


def test_position_is_valid_for_another_number_of_ranks():
    whole = order(OrderedSampler(24, shuffle=True, seed=1), 0)
    four_ranks = [order(OrderedSampler(24, shuffle=True, seed=1, world=World(rank, 4)), 0)[:3] for rank in range(4)]
    two_ranks = [order(OrderedSampler(24, shuffle=True, seed=1, world=World(rank, 2)), 0, 12) for rank in range(2)]
    assert sorted(sample for rank in four_ranks + two_ranks for sample in rank) == sorted(whole)


def test_long_orders_are_read_in_chunks():
    num_samples = 3 * 2**16 + 5
    assert sorted(order(OrderedSampler(num_samples, shuffle=True, seed=0), 0)) == list(range(num_samples))


@pytest.mark.parametrize("wrong", [0, -1, 2.0, None])
def test_wrong_length(wrong: object):
    with pytest.raises(DataError, match="num_samples="):
        OrderedSampler(wrong, shuffle=True, seed=0)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_position_outside_the_epoch(wrong: int):
    with pytest.raises(DataError, match="num_samples_done="):
        OrderedSampler(10, shuffle=True, seed=0).set_position(0, wrong)


def test_walk_past_the_end():
    walked = WalkedSampler([[0], [1]], numbered=False)
    walked.skip(3)
    with pytest.raises(DataError, match="ended after 2 batches"):
        walked.walk()


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_ranks_of_a_round_that_they_cannot_divide_read_its_samples(shuffle: bool) -> None:
    [alone, *ranks] = [
        OrderedSampler(50, shuffle=shuffle, seed=1, world=World(rank, size), num_in_round=16)
        for rank, size in ((0, 1), (0, 3), (1, 3), (2, 3))
    ]
    for done in (0, 16, 20):
        for each in (alone, *ranks):
            each.set_position(2, done)
        of_ranks = [[*RoundBatches(each)] for each in ranks]
        for places, whole in zip(zip(*of_ranks, strict=True), alone.rounds(), strict=False):
            assert sorted(chain.from_iterable(places)) == sorted(whole)
            assert max(map(len, places)) - min(map(len, places)) <= 1
        assert {len(each) for each in of_ranks} == {(50 - done) // 16 + ((50 - done) % 16 >= 3)}
        for each, batches in zip(ranks, of_ranks, strict=True):
            assert each.indices_behind(done, 2) == [*chain(*batches[:2])]
    assert [len(RoundBatches(each)) for each in ranks] == [3, 3, 3]
