"""The global batch stays the same for any number of ranks that divides the batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roomier.core.errors import RoomierError
from roomier.run.accumulation import GlobalBatch


@pytest.mark.parametrize(
    ("before", "num_ranks", "batch_size", "after"),
    [
        (GlobalBatch(8, 2, 4), 2, 8, GlobalBatch(8, 4, 2)),  # fewer ranks, more micro-batches
        (GlobalBatch(8, 2, 2), 4, 8, GlobalBatch(8, 1, 4)),
        # with more ranks than micro-batches, the micro-batches are smaller
        (GlobalBatch(8, 1, 2), 4, 8, GlobalBatch(4, 1, 4)),
        (GlobalBatch(8, 1, 4), 3, 8, GlobalBatch(6, 2, 3, 16)),  # 6, 5 and 5 samples
        (GlobalBatch(6, 2, 3, 16), 4, 8, GlobalBatch(8, 1, 4)),
        (GlobalBatch(1, 1, 2), 3, 8, None),
        (GlobalBatch(6, 1, 4), 3, 6, GlobalBatch(4, 2, 3)),
        (GlobalBatch(8, 1, 4), 2, 16, GlobalBatch(16, 1, 2)),  # a script that divides the batch among the ranks
        (GlobalBatch(None, 2, 2), 4, None, GlobalBatch(None, 1, 4)),
        (GlobalBatch(None, 1, 2), 4, None, None),
    ],
)
def test_examples(before: GlobalBatch, num_ranks: int, batch_size: int | None, after: GlobalBatch | None) -> None:
    if after is not None:
        assert before.on(num_ranks, batch_size) == after
        return
    with pytest.raises(RoomierError, match="Restart with one of these numbers of ranks: 1, 2"):
        before.on(num_ranks, batch_size)


@given(
    batch=st.builds(GlobalBatch, st.integers(1, 64), st.integers(1, 8), st.integers(1, 8)),
    num_ranks=st.integers(1, 16),
    batch_size=st.integers(1, 64),
)
def test_the_size_is_kept_and_no_micro_batch_grows(batch: GlobalBatch, num_ranks: int, batch_size: int) -> None:
    if batch.size < num_ranks:
        return
    try:
        after = batch.on(num_ranks, batch_size)
    except RoomierError:
        # no number of micro-batches divides the batch so that each rank has 1 to batch_size samples
        assert batch.size % num_ranks
        return
    assert after.size == batch.size
    assert after.num_ranks == num_ranks
    assert after.batch_size is not None
    assert after.batch_size <= batch_size
    assert (after.num_in_round is None) == (batch.size % num_ranks == 0)
