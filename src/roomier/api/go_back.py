"""What a callback raises in a fit to let it go on from its last checkpoint."""

from __future__ import annotations


class GoBackError(Exception):
    """Caught by the training loop, which puts back the newest checkpoint of the run and goes on from there. Every rank
    must raise it at the same place: in ``on_train_batch_end`` of the last micro-batch of a step, or where
    ``Run.before_checkpoint`` is called. What raises it must see to it that the run does not come back to it for ever.

    Attributes:
        reason: for the user, and for the error if there is no checkpoint.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
