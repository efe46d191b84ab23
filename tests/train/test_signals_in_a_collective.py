"""If a rank waits in a collective for a rank that does not respond, the waiting rank exits after a second signal."""

import os
import signal
import threading
import time
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roomier.run import signals
from roomier.run.signals import GracefulStop
from tests.ranks.pool import RankFailed, RankPool

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def send_to_itself(num_signals: int) -> None:
    for _ in range(num_signals):
        time.sleep(0.5)  # by this time, the main thread is waiting
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_rank_1(num_signals: int, is_in_vain: bool) -> signal.Signals | None:
    signals.TO_OBEY_S = 0.2
    if dist.get_rank() == 1:
        if not is_in_vain:
            time.sleep(1)
            dist.send(torch.ones(1), 0)
        return None
    threading.Thread(target=send_to_itself, args=(num_signals,), daemon=True).start()
    with GracefulStop(is_alone=False) as stop:
        dist.recv(torch.zeros(1), 1)
    return stop.noted


def test_second_signal_ends_a_waiting_rank(on_ranks: RankPool) -> None:
    # On a busy machine, the rank may not wait yet. In this case, the handler of the second signal ends the rank.
    with pytest.raises(RankFailed, match=r"exit status 143(?s:.*)exiting after a second signal|SystemExit: 143"):
        on_ranks(2, wait_for_rank_1, 2, True)


def test_one_signal_takes_effect_after_the_wait(on_ranks: RankPool) -> None:
    assert on_ranks(2, wait_for_rank_1, 1, False) == [signal.SIGTERM, None]


def test_signals_of_forked_workers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(signals, "TO_OBEY_S", 0.0)
    monkeypatch.setattr(signals, "os", SimpleNamespace(_exit=ended.append, environ={}))
    before = signal.set_wakeup_fd(-1)
    with GracefulStop(is_alone=False) as stop:
        worker = get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        assert worker.pid is not None
        for _ in range(2):
            os.kill(worker.pid, signal.SIGTERM)
            time.sleep(0.1)
        worker.kill()
        worker.join()
    assert (ended, stop.noted) == ([], None)
    assert signal.set_wakeup_fd(before) == -1
