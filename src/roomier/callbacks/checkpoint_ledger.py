"""Which checkpoints of a run are kept, and which of them is the best: values, no files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from roomier.core.forms import Form, anything, fields, integer, items, list_of, number, optional, text

Scored: TypeAlias = tuple[str, float | None]
"""Path and score of a checkpoint; the score is None where nothing is monitored."""


@dataclass(frozen=True)
class Keep:
    """What is kept: the ``top_k`` best (-1: all, 0: none) and, if ``last``, the newest beside them.

    Without scores (``monitored`` is False) newer is better.
    """

    top_k: int
    lower_is_better: bool
    monitored: bool
    last: bool


@dataclass(frozen=True)
class Ledger:
    """The books after some save. A save makes a new ledger, so one that fails leaves the old one as it was.

    Attributes:
        kept: the top-k, oldest first.
        last: path of the newest checkpoint where the newest is kept, else ``""``.
        superseded: what the latest save made obsolete. It is removed after that save is committed; it stays
            listed until the next one, so that a run killed in between can finish the removal when it resumes.
        current_score: of the newest of those that were among the top-k when they were saved.
        step: optimizer steps done at the latest save, -1 before the first.
        newest_path: where the latest save went; not known after a resume.
    """

    kept: tuple[Scored, ...] = ()
    last: str = ""
    superseded: tuple[str, ...] = ()
    current_score: float | None = None
    step: int = -1
    newest_path: str = ""

    @property
    def paths(self) -> set[str]:
        """All checkpoints that must stay."""
        return {path for path, _ in self.kept} | ({self.last} - {""})

    def ranked(self, keep: Keep) -> list[Scored]:
        """The top-k, best first. NaN is worse than any number; of equal scores the older is the better."""
        if not keep.monitored:
            return list(reversed(self.kept))
        return sorted(self.kept, key=lambda item: _badness(item[1], keep))

    def best(self, keep: Keep) -> Scored:
        """The best and its score; ``("", None)`` where there is none. NaN is never the best."""
        ranked = self.ranked(keep)
        if not ranked or (keep.monitored and _badness(ranked[0][1], keep) == (1, 0.0)):
            return "", None
        return ranked[0]

    def kth(self, keep: Keep) -> Scored:
        """The one a better checkpoint pushes out; ``("", None)`` while fewer than k are kept, or all are."""
        ranked = self.ranked(keep)
        return ranked[keep.top_k - 1] if 1 <= keep.top_k <= len(ranked) else ("", None)

    def enters(self, score: float | None, keep: Keep) -> bool:
        """Whether a checkpoint of this score would be among the top-k. NaN is not, unless all are kept; one whose
        score is monitored and not known (None) never is."""
        if keep.top_k == 0 or (keep.monitored and score is None):
            return False
        if keep.top_k == -1 or score is None:
            return True
        path, kth_score = self.kth(keep)
        return not math.isnan(score) and (path == "" or _badness(score, keep) < _badness(kth_score, keep))

    def before_saving(self, score: float | None, keep: Keep) -> Ledger:
        """The ledger without what a save of ``score`` pushes out: what it still holds must not be replaced."""
        last = "" if keep.last else self.last
        if keep.top_k < 1 or not self.enters(score, keep):
            return replace(self, last=last)
        staying = self.ranked(keep)[: keep.top_k - 1]
        return replace(self, kept=tuple(item for item in self.kept if item in staying), last=last)

    def after_saving(self, path: str, score: float | None, step: int, keep: Keep) -> Ledger:
        """The ledger once a checkpoint of ``score`` stands at ``path``."""
        staying = tuple(item for item in self.before_saving(score, keep).kept if item[0] != path)
        is_ranked = self.enters(score, keep)
        new = Ledger(
            kept=(*staying, (path, score)) if is_ranked else staying,
            last=path if keep.last else "",
            current_score=score if is_ranked else self.current_score,
            step=step,
            newest_path=path,
        )
        return replace(new, superseded=tuple(sorted(self.paths - new.paths)))


def form_of_books(*, monitored: bool) -> Form:
    """The form of the state of a ModelCheckpoint. A monitored checkpoint has a score."""
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


def _badness(score: float | None, keep: Keep) -> tuple[int, float]:
    assert score is not None, "a monitored checkpoint has a score"
    if math.isnan(score):
        return 1, 0.0
    return 0, score if keep.lower_is_better else -score
