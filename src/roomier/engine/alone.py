"""The ``Parallel`` of a run with a single rank."""

from __future__ import annotations

from roomier.techniques.parallel.unsharded import Unsharded


class Alone(Unsharded):
    """:class:`Parallel` for a single rank, which neither shards nor reduces."""

    runner = None
    loss_factor = 1.0

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None: ...
    def end_backward(self) -> None: ...
    def end_update(self) -> None: ...
    def trained_parameters_changed(self) -> None: ...
