"""Which checkpoints are kept, worked out by hand and against a reference that sorts all of them."""

import math
import random

import pytest

from roomier.callbacks.checkpoint_ledger import Keep, Ledger

BEST_TWO = Keep(top_k=2, lower_is_better=True, monitored=True, last=False)


def play(keep: Keep, scores: list[float | None]) -> list[Ledger]:
    """Save checkpoint ``"0"``, ``"1"``, ... with these scores; the ledger after each."""
    ledger, ledgers = Ledger(), []
    for step, score in enumerate(scores):
        if ledger.enters(score, keep) or keep.last:
            ledger = ledger.after_saving(str(step), score, step, keep)
        ledgers.append(ledger)
    return ledgers


def test_the_best_two_of_five() -> None:
    ledgers = play(BEST_TWO, [3.0, 5.0, 4.0, 4.0, 1.0])
    assert [[path for path, _ in ledger.kept] for ledger in ledgers] == [
        ["0"],
        ["0", "1"],
        ["0", "2"],  # 4 beats 5
        ["0", "2"],  # 4 does not beat 4
        ["0", "4"],
    ]
    assert [ledger.best(BEST_TWO)[0] for ledger in ledgers] == ["0", "0", "0", "0", "4"]
    assert [ledger.kth(BEST_TWO)[0] for ledger in ledgers] == ["", "1", "2", "2", "0"]
    assert [ledger.superseded for ledger in ledgers] == [(), (), ("1",), ("1",), ("2",)]


def test_the_newest_is_kept_beside_the_best() -> None:
    keep = Keep(top_k=1, lower_is_better=True, monitored=True, last=True)
    ledgers = play(keep, [2.0, 3.0, 4.0, 1.0, 5.0])
    assert [ledger.paths for ledger in ledgers] == [{"0"}, {"0", "1"}, {"0", "2"}, {"3"}, {"3", "4"}]
    assert [ledger.superseded for ledger in ledgers] == [(), (), ("1",), ("0", "2"), ()]
    assert [ledger.last for ledger in ledgers] == list("01234")


def test_without_a_score_the_newest_is_the_best() -> None:
    keep = Keep(top_k=1, lower_is_better=True, monitored=False, last=False)
    ledgers = play(keep, [None, None, None])
    assert [ledger.best(keep)[0] for ledger in ledgers] == ["0", "1", "2"]
    assert [ledger.superseded for ledger in ledgers] == [(), ("0",), ("1",)]


def test_nan_is_not_among_the_best() -> None:
    ledgers = play(BEST_TWO, [math.nan, 2.0, math.nan, math.inf])
    assert [ledger.paths for ledger in ledgers] == [set(), {"1"}, {"1"}, {"1", "3"}]
    everything = Keep(top_k=-1, lower_is_better=False, monitored=True, last=False)
    ledgers = play(everything, [math.nan, -math.inf, 1.0])
    assert ledgers[-1].paths == {"0", "1", "2"}, "all are kept"
    assert [ledger.best(everything)[0] for ledger in ledgers] == ["", "1", "2"]


def test_none_is_kept_with_zero_but_the_newest_may_be() -> None:
    assert play(Keep(0, True, True, last=False), [1.0, 2.0])[-1].paths == set()
    assert play(Keep(0, True, True, last=True), [1.0, 2.0])[-1].paths == {"1"}


def test_a_smaller_k_after_a_resume_drops_the_surplus_with_the_next_save() -> None:
    ledger = play(Keep(4, True, True, last=False), [4.0, 3.0, 2.0, 1.0])[-1]
    assert not ledger.enters(2.5, BEST_TWO)
    ledger = ledger.after_saving("new", 1.5, 9, BEST_TWO)
    assert ledger.paths == {"3", "new"}
    assert ledger.superseded == ("0", "1", "2")


def test_a_name_used_again_counts_once() -> None:
    keep = Keep(top_k=1, lower_is_better=True, monitored=True, last=True)
    ledger = Ledger().after_saving("best", 2.0, 1, keep).after_saving("best", 1.0, 2, keep)
    assert ledger.kept == (("best", 1.0),)
    assert ledger.superseded == ()


@pytest.mark.parametrize("lower_is_better", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_top_k_of_random_scores_are_those_of_a_sort(k: int, lower_is_better: bool) -> None:
    draw = random.Random(k)
    scores = [draw.choice([math.nan, draw.randint(0, 30) / 2]) for _ in range(60)]
    keep = Keep(k, lower_is_better, monitored=True, last=False)
    ledgers = play(keep, list(scores))
    for end, ledger in enumerate(ledgers, start=1):
        so_far = sorted((s for s in scores[:end] if not math.isnan(s)), reverse=not lower_is_better)
        assert sorted((s for _, s in ledger.kept if s is not None), reverse=not lower_is_better) == so_far[:k]
        assert ledger.best(keep)[1] == (so_far[0] if so_far else None)
