"""The rendezvous, with threads as ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from roomier.core.errors import RoomierError
from roomier.core.world import World
from roomier.launch.failure import FailureNews, is_of_lost_peer
from roomier.launch.meet import connect_again, meet, serve


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def together(store: HashStore, worlds: list[World], timeout_s: float = 20.0) -> list[str | RoomierError]:
    def one(world: World) -> str | RoomierError:
        try:
            return meet(world, store, timeout_s)
        except RoomierError as error:
            return error

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(one, worlds))


def ranks(size: int) -> list[World]:
    return [World(rank, size, local_rank=rank, local_size=size) for rank in range(size)]


def test_all_ranks_join_the_same_meeting(store: HashStore) -> None:
    names = together(store, ranks(4))
    assert isinstance(names[0], str)
    assert names == [names[0]] * 4


def test_keys_of_an_earlier_meeting_are_ignored(store: HashStore) -> None:
    first = together(store, ranks(3))
    late_zero: list[str | RoomierError] = []
    thread = threading.Timer(0.3, lambda: late_zero.extend(together(store, ranks(3)[:1])))
    thread.start()  # the other ranks start before rank 0, and find the keys of the first meeting
    others = together(store, ranks(3)[1:])
    thread.join()
    assert others == late_zero * 2
    assert late_zero[0] != first[0]


def test_missing_ranks_are_reported(store: HashStore) -> None:
    zero, one = together(store, [ranks(4)[0], ranks(4)[2]], timeout_s=0.3)
    assert isinstance(zero, RoomierError)
    assert "of 4 ranks, these did not connect within 0.3 s: 1, 3" in str(zero)
    assert "rank 0 did not start the rendezvous of 4 ranks within 0.3 s" in str(one)


def test_different_world_sizes_are_reported(store: HashStore) -> None:
    zero, one = ranks(2)
    errors = together(store, [zero, replace(one, size=4)])
    text = "rank 1 expects 4 ranks with 2 per node, but rank 0 expects 2 with 2"
    assert all(text in str(error) for error in errors)


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def news() -> Callable[[int], FailureNews]:
    server = serve("127.0.0.1", 20.0)

    def of(rank: int) -> FailureNews:
        made = FailureNews(World(rank, 3))
        made.store = connect_again(server, 20.0)
        return made

    return of


def test_an_error_of_all_ranks_is_reported_by_one_rank(news: Callable[[int], FailureNews]) -> None:
    assert news(1).claim("ValueError: the data is not there")
    assert not news(0).claim("ValueError: the data is not there")
    assert news(2).claim("KeyError: something else")


def test_a_rank_that_lost_its_peer_reads_which_rank_failed(news: Callable[[int], FailureNews]) -> None:
    threading.Timer(0.3, lambda: news(1).claim("ValueError: late")).start()
    assert news(0).wait_for_peer() == "rank 1 failed"


def test_reported_failures_are_visible_to_other_ranks(news: Callable[[int], FailureNews]) -> None:
    mine = news(0)
    assert not mine.is_reported(within_s=0.0)
    assert not FailureNews(World(0, 3)).is_reported(within_s=60.0)  # returns immediately before the rendezvous
    news(1).claim("ValueError: late")
    assert mine.is_reported(within_s=0.0)


def test_errors_that_only_report_a_lost_peer_are_recognized() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1")
    assert is_of_lost_peer(lost)
    assert is_of_lost_peer(dist.DistBackendError("NCCL error"))
    outer = KeyError("in a hook")
    outer.__cause__ = lost
    assert is_of_lost_peer(outer)
    assert not is_of_lost_peer(RuntimeError("shapes do not match"))
    assert not is_of_lost_peer(RuntimeError("[gloo/transport/tcp/socket.cc:24] socket: Too many open files"))
