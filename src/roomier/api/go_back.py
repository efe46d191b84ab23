"""Exception that a callback raises to continue a fit from its last checkpoint."""

from __future__ import annotations


class GoBackError(Exception):
    """Exception that a callback raises to restore the newest checkpoint of the run and continue training from it.

    Every rank must raise this exception at the same place: in ``on_train_batch_end`` of the last micro-batch of a step,
    or in one of the functions in ``Run.looks``. The callback must ensure that the run does not return to the same
    checkpoint forever.

    Attributes:
        reason: text for the notice, and for the error if there is no checkpoint.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
