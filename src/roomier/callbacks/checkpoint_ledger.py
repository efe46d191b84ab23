"""Ledger of the kept checkpoints of a run and their scores. This module does not access files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from roomier.core.forms import Form, anything, fields, integer, items, list_of, number, optional, text

Scored: TypeAlias = tuple[str, float | None]
"""Path and score of a checkpoint. The score is None if no metric is monitored."""


@dataclass(frozen=True)
class Retention:
    """Rule that selects the checkpoints to keep.

    Attributes:
        top_k: number of best checkpoints to keep; -1 keeps all checkpoints, and 0 keeps none.
        lower_is_better: True if a lower score is better.
        monitored: True if checkpoints have scores. If False, newer checkpoints are better.
        last: True if the newest checkpoint is also kept.
        given_path: checkpoint that is never removed; see :attr:`roomier.run.settled.Start.given_path`.
    """

    top_k: int
    lower_is_better: bool
    monitored: bool
    last: bool
    given_path: str = ""


@dataclass(frozen=True)
class Ledger:
    """Record of the kept checkpoints after a save.

    Each save creates a new ledger, so a failed save leaves the previous ledger unchanged.

    Attributes:
        kept: the top-k checkpoints, oldest first.
        last: path of the newest checkpoint if :attr:`Retention.last` is True, otherwise ``""``.
        superseded: checkpoints that the latest save made obsolete. These checkpoints are removed after that save is
            committed, but stay listed until the next save. If the run is killed before it removes these checkpoints,
            the resumed run removes them.
        current_score: score of the newest checkpoint that was among the top-k when it was saved.
        step: number of optimizer steps at the latest save; -1 before the first save.
        newest_path: path of the latest save; ``""`` after a resume.
    """

    kept: tuple[Scored, ...] = ()
    last: str = ""
    superseded: tuple[str, ...] = ()
    current_score: float | None = None
    step: int = -1
    newest_path: str = ""

    @property
    def paths(self) -> set[str]:
        """Paths of all checkpoints that must not be removed."""
        return {path for path, _ in self.kept} | ({self.last} - {""})

    def ranked(self, keep: Retention) -> list[Scored]:
        """Return the top-k checkpoints, best first. NaN is worse than any number. If scores are equal, the older
        checkpoint is better.
        """
        if not keep.monitored:
            return list(reversed(self.kept))
        return sorted(self.kept, key=lambda item: _badness(item[1], keep))

    def best(self, keep: Retention) -> Scored:
        """Return the best checkpoint, or ``("", None)`` if no best checkpoint exists. A checkpoint with the score NaN
        is never the best checkpoint.
        """
        ranked = self.ranked(keep)
        if not ranked or (keep.monitored and _badness(ranked[0][1], keep) == (1, 0.0)):
            return "", None
        return ranked[0]

    def kth(self, keep: Retention) -> Scored:
        """Return the worst of the top-k checkpoints, which the next better checkpoint would replace.

        Return ``("", None)`` if fewer than k checkpoints are kept.
        """
        ranked = self.ranked(keep)
        k = len(ranked) if keep.top_k == -1 else keep.top_k
        return ranked[k - 1] if 1 <= k <= len(ranked) else ("", None)

    def enters(self, score: float | None, keep: Retention) -> bool:
        """Return True if a checkpoint with this score would be among the top-k.

        A checkpoint with the score NaN is among the top-k only if all checkpoints are kept. If a metric is monitored, a
        checkpoint without a score is never among the top-k.
        """
        if keep.top_k == 0 or (keep.monitored and score is None):
            return False
        if keep.top_k == -1 or score is None:
            return True
        path, kth_score = self.kth(keep)
        return not math.isnan(score) and (path == "" or _badness(score, keep) < _badness(kth_score, keep))

    def before_saving(self, score: float | None, keep: Retention) -> Ledger:
        """Return the ledger without the checkpoints that a save with ``score`` would replace.

        The checkpoints that remain in the ledger must not be overwritten.
        """
        last = "" if keep.last else self.last
        if keep.top_k < 1 or not self.enters(score, keep):
            return replace(self, last=last)
        staying = self.ranked(keep)[: keep.top_k - 1]
        return replace(self, kept=tuple(item for item in self.kept if item in staying), last=last)

    def after_saving(self, path: str, score: float | None, step: int, keep: Retention) -> Ledger:
        """Return the ledger after a checkpoint with ``score`` was saved to ``path``."""
        staying = tuple(item for item in self.before_saving(score, keep).kept if item[0] != path)
        is_ranked = self.enters(score, keep)
        new = Ledger(
            kept=(*staying, (path, score)) if is_ranked else staying,
            last=path if keep.last else "",
            current_score=score if is_ranked else self.current_score,
            step=step,
            newest_path=path,
        )
        return replace(new, superseded=tuple(sorted(self.paths - new.paths - {keep.given_path})))


def ledger_form(*, monitored: bool) -> Form:
    """Return the schema of a ModelCheckpoint's state. If ``monitored`` is True, every checkpoint must have a score."""
    return fields(
        {
            "monitor": optional(text),
            "dirpath": optional(text),
            "kept": list_of(items(text, number if monitored else optional(number))),
            "last": text,
            "superseded": list_of(text),
            "current_score": optional(number),
            "step": integer(-1),
            "due_step": integer(-1),
            "foreign_names": optional(list_of(text)),
        },
        others=anything,
    )


def _badness(score: float | None, keep: Retention) -> tuple[int, float]:
    assert score is not None, "a monitored checkpoint has a score"
    if math.isnan(score):
        return 1, 0.0
    return 0, score if keep.lower_is_better else -score
