"""Checkpoints that are kept: hand-computed examples, and a reference that sorts all checkpoints."""

import math
import random

import pytest

from roomier.callbacks.checkpoint_ledger import Ledger, Retention

BEST_TWO = Retention(top_k=2, lower_is_better=True, monitored=True, last=False)


def play(keep: Retention, scores: list[float | None]) -> list[Ledger]:
    """Save checkpoints ``"0"``, ``"1"``, ... with these scores, and return the ledger after each checkpoint."""
    ledger, ledgers = Ledger(), []
    for step, score in enumerate(scores):
        if ledger.enters(score, keep) or keep.last:
            ledger = ledger.after_saving(str(step), score, step, keep)
        ledgers.append(ledger)
    return ledgers


def test_best_two_of_five_are_kept() -> None:
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


def test_newest_is_kept_in_addition_to_the_best() -> None:
    keep = Retention(top_k=1, lower_is_better=True, monitored=True, last=True)
    ledgers = play(keep, [2.0, 3.0, 4.0, 1.0, 5.0])
    assert [ledger.paths for ledger in ledgers] == [{"0"}, {"0", "1"}, {"0", "2"}, {"3"}, {"3", "4"}]
    assert [ledger.superseded for ledger in ledgers] == [(), (), ("1",), ("0", "2"), ()]
    assert [ledger.last for ledger in ledgers] == list("01234")


def test_newest_is_best_without_scores() -> None:
    keep = Retention(top_k=1, lower_is_better=True, monitored=False, last=False)
    ledgers = play(keep, [None, None, None])
    assert [ledger.best(keep)[0] for ledger in ledgers] == ["0", "1", "2"]
    assert [ledger.superseded for ledger in ledgers] == [(), ("0",), ("1",)]


def test_nan_is_not_ranked() -> None:
    ledgers = play(BEST_TWO, [math.nan, 2.0, math.nan, math.inf])
    assert [ledger.paths for ledger in ledgers] == [set(), {"1"}, {"1"}, {"1", "3"}]
    everything = Retention(top_k=-1, lower_is_better=False, monitored=True, last=False)
    ledgers = play(everything, [math.nan, -math.inf, 1.0])
    assert ledgers[-1].paths == {"0", "1", "2"}, "top_k=-1 keeps all"
    assert [ledger.best(everything)[0] for ledger in ledgers] == ["", "1", "2"]


def test_top_k_zero_keeps_only_the_newest() -> None:
    assert play(Retention(0, True, True, last=False), [1.0, 2.0])[-1].paths == set()
    assert play(Retention(0, True, True, last=True), [1.0, 2.0])[-1].paths == {"1"}


def test_smaller_top_k_after_a_resume_applies_at_the_next_save() -> None:
    ledger = play(Retention(4, True, True, last=False), [4.0, 3.0, 2.0, 1.0])[-1]
    assert not ledger.enters(2.5, BEST_TWO)
    ledger = ledger.after_saving("new", 1.5, 9, BEST_TWO)
    assert ledger.paths == {"3", "new"}
    assert ledger.superseded == ("0", "1", "2")


def test_reused_path_counts_one_time() -> None:
    keep = Retention(top_k=1, lower_is_better=True, monitored=True, last=True)
    ledger = Ledger().after_saving("best", 2.0, 1, keep).after_saving("best", 1.0, 2, keep)
    assert ledger.kept == (("best", 1.0),)
    assert ledger.superseded == ()


@pytest.mark.parametrize("lower_is_better", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_of_random_scores_matches_sorting(k: int, lower_is_better: bool) -> None:
    draw = random.Random(k)
    scores = [draw.choice([math.nan, draw.randint(0, 30) / 2]) for _ in range(60)]
    keep = Retention(k, lower_is_better, monitored=True, last=False)
    ledgers = play(keep, list(scores))
    for end, ledger in enumerate(ledgers, start=1):
        so_far = sorted((s for s in scores[:end] if not math.isnan(s)), reverse=not lower_is_better)
        assert sorted((s for _, s in ledger.kept if s is not None), reverse=not lower_is_better) == so_far[:k]
        assert ledger.best(keep)[1] == (so_far[0] if so_far else None)
