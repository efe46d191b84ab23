"""A trace of a model whose blocks keep in host memory what they keep for their backward.

A dry run happens on one memory, so this is a formula: that of [Note: two blocks at a time] in
:mod:`roomier.activation.offload`. While a block runs, forward or backward, the device holds what it and the one before
it keep; the host holds what all of them do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from roomier.activation.offload import MIN_BYTES
from roomier.planner.formula.trace import Passage, Rise, Trace


def moved_to_host(trace: Trace, blocks: Collection[str]) -> tuple[Trace, int]:
    """``trace`` as the device sees it, and the bytes in host memory at the end of a forward.

    Args:
        trace: with everything on the device.
        blocks: the names of those that move what they keep.
    """
    kept = {place: num_bytes for place, num_bytes in trace.kept_bytes(blocks).items() if num_bytes >= MIN_BYTES}
    order = list(kept)
    away_at = {place: sum(kept[each] for each in order[: max(0, number - 1)]) for number, place in enumerate(order)}
    passages: list[Passage] = []
    away_bytes = 0
    for each in trace.passages:
        if each.place in away_at:
            change = away_bytes - away_at[each.place]
            away_bytes -= change
            each = _begun_with(each, Rise(activation=change))
        passages.append(each)
    return replace(trace, passages=tuple(passages)), sum(kept.values())


def _begun_with(passage: Passage, change: Rise) -> Passage:
    return replace(passage, moments=tuple(each.plus(change) for each in passage.moments))
