"""Content of records: for each tier, random sequences of calls yield the same content as a dict."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roomier.techniques.tiers.buffers import _slabs, buffer_sizes, padded
from roomier.techniques.tiers.disk import DiskTier
from roomier.techniques.tiers.scratch import Scratch
from roomier.techniques.tiers.tier import HostTier, Tier
from tests.covering import few

SIZES = [5000, 5000, 4096, 4096, 0, 1, 70_000]
LARGE = 6  # the record that is larger than twice the median
SAME_SIZE = {0: 1, 1: 0, 2: 3, 3: 2}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scratch]:
    scratch = Scratch(tmp_path_factory.mktemp("scratch"))
    yield scratch
    scratch.close()


def make_tier(kind: str, num_buffers: int, scratch: Scratch) -> Tier:
    if kind == "host":
        return HostTier(SIZES, pinned=False)
    num_ahead = 0 if kind == "disk without reading ahead" else None
    shares_large = kind == "disk with one large buffer"
    return DiskTier(scratch, SIZES, num_buffers, pinned=False, num_ahead=num_ahead, shares_large=shares_large)


class Model:
    """State of the test: a tier, and the content that its records must have."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.content = {record: torch.zeros(size, dtype=torch.uint8) for record, size in enumerate(SIZES)}
        self.held: dict[int, Tensor] = {}
        for record in self.content:
            self.write(record, self.tier.blank(record), 0)

    def write(self, record: int, buffer: Tensor, seed: int) -> None:
        self.content[record] = torch.randint(256, (SIZES[record],), dtype=torch.uint8)
        if seed % 2:
            buffer.copy_(self.content[record])
            self.tier.put(record, buffer)
        else:  # the content is complete when the function returns
            late = self.content[record].clone()
            self.tier.put(record, buffer, wait=lambda: buffer.copy_(late))

    def call(self, name: str, record: int, seed: int) -> None:
        num_bytes = [None, 0, 1, 4096][seed % 4]
        if name == "expect":
            records = random.Random(seed).choices(range(len(SIZES)), k=record + 1)
            self.tier.expect(records, None if seed % 3 else [SIZES[each] // (1 + seed % 2) for each in records])
        elif name == "settle":
            self.tier.settle()
        elif name == "mapped" and not self.held:
            self.tier.settle()
            mapped = self.tier.mapped(record)
            assert torch.equal(mapped, self.content[record])
            self.content[record] = torch.randint(256, (SIZES[record],), dtype=torch.uint8)
            mapped.copy_(self.content[record])
        elif record in self.held:
            self.give_back(name, record, seed)
        elif len(self.held) < self.tier.num_buffers and name in ("take", "blank"):
            while record == LARGE and self.held:  # a small record may be in the only buffer with enough room
                self.give_back("put", next(iter(self.held)), seed)
            if name == "take":
                self.held[record] = self.tier.take(record, None if num_bytes is None else min(num_bytes, SIZES[record]))
                read = SIZES[record] if num_bytes is None else num_bytes
                assert torch.equal(self.held[record][:read], self.content[record][:read])
            else:
                self.held[record] = self.tier.blank(record)
            assert self.held[record].shape == (SIZES[record],)

    def give_back(self, name: str, record: int, seed: int) -> None:
        buffer = self.held.pop(record)
        target = SAME_SIZE.get(record)
        if name == "switch" and target is not None and target not in self.held:
            self.write(target, self.tier.switch(buffer, target), seed)
        elif name == "drop":
            self.tier.drop(buffer)
        else:
            self.write(record, buffer, seed)

    def end(self) -> None:
        for record in list(self.held):
            self.give_back("put", record, 0)
        self.tier.expect(range(len(SIZES)))
        for record in range(len(SIZES)):
            buffer = self.tier.take(record)
            assert torch.equal(buffer, self.content[record])
            self.tier.drop(buffer)
        self.tier.settle()


names = st.sampled_from(["expect", "take", "take", "take", "blank", "switch", "drop", "put", "settle", "mapped"])
calls = st.lists(st.tuples(names, st.integers(0, len(SIZES) - 1), st.integers(0, 100)), min_size=20, max_size=80)


@pytest.mark.parametrize("kind", few(["disk", "host", "disk with one large buffer", "disk without reading ahead"], 2))
@given(calls=calls, num_buffers=st.integers(1, 4))
def test_records_have_the_content_of_a_dict(
    kind: str, scratch: Scratch, calls: list[tuple[str, int, int]], num_buffers: int
) -> None:
    tier = make_tier(kind, num_buffers, scratch)
    model = Model(tier)
    for call in calls:
        model.call(*call)
    model.end()
    tier.close()


def test_traffic_is_exact_if_records_are_expected_in_their_order(scratch: Scratch) -> None:
    tier = DiskTier(scratch, [10_000] * 8, num_buffers=3, pinned=False)
    for _ in range(5):
        tier.expect(range(8))
        for record in range(8):
            tier.put(record, tier.take(record))
        tier.settle()
    assert tier.bytes_read == tier.bytes_written == 5 * 8 * 12_288
    assert tier.disk_bytes == 8 * 12_288
    assert tier.host_bytes == 3 * 12_288
    tier.expect(range(8), [4096] * 8)
    for record in range(8):
        tier.drop(tier.take(record, 4096))
    tier.settle()
    assert tier.bytes_read == 5 * 8 * 12_288 + 8 * 4096
    tier.close()


def test_large_records_share_one_buffer(scratch: Scratch) -> None:
    sizes = [100_000, 20_000, 20_000, 8_000, 20_000, 90_000]
    assert buffer_sizes(sizes, 3) == [102_400, 20_480, 20_480]
    assert buffer_sizes(sizes[1:5], 3) == [20_480] * 3
    assert buffer_sizes(sizes[:1], 3) == [102_400] * 3
    tier = DiskTier(scratch, sizes, num_buffers=3, pinned=False, shares_large=True)
    assert tier.host_bytes == 102_400 + 2 * 20_480
    for record in range(len(sizes)):
        tier.put(record, tier.blank(record).fill_(record))
    for _ in range(3):
        tier.expect(range(len(sizes)))
        for record in range(len(sizes)):
            buffer = tier.take(record)
            assert buffer.eq(record).all()
            tier.put(record, buffer)
        tier.settle()
    assert tier.bytes_read == 3 * sum(map(padded, sizes))  # no record is read twice
    tier.close()


def test_calls_do_not_wait_for_transfers(scratch: Scratch) -> None:
    tier = DiskTier(scratch, [5000] * 3, num_buffers=4, pinned=False, num_ahead=1)
    may_write = threading.Event()
    for record in range(2):  # the writer cannot continue
        tier.put(record, tier.blank(record).fill_(record + 1), wait=may_write.wait)
    tier.expect([1, 0])
    third = tier.blank(2)
    assert tier.bytes_read == tier.bytes_written == 0
    may_write.set()
    assert tier.take(1).eq(2).all()
    assert tier.take(0).eq(1).all()
    tier.drop(third)
    tier.close()


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="Windows has no madvise")
def test_a_free_buffer_has_no_memory_if_records_are_not_read_ahead(scratch: Scratch) -> None:
    for num_ahead, content in ((0, 0), (1, 7)):
        tier = DiskTier(scratch, [10_000], num_buffers=1, pinned=False, num_ahead=num_ahead)
        tier.put(0, tier.blank(0).fill_(7))
        tier.settle()
        tier.expect([])
        assert tier.blank(0).eq(content).all()  # pages that were returned contain zeros
        tier.close()


def test_a_buffer_is_not_reused_before_its_wait(scratch: Scratch) -> None:
    tier = DiskTier(scratch, [4096] * 2, num_buffers=1, pinned=False)
    for record in range(2):
        tier.put(record, tier.blank(record).fill_(record + 1))
    copied: list[int] = []
    buffer = tier.take(0)
    tier.drop(buffer, wait=lambda: copied.append(int(buffer[0])))
    assert tier.take(1)[0] == 2
    assert copied == [1]
    tier.close()


def test_a_buffer_whose_read_was_cancelled_is_not_reused_before_its_wait(scratch: Scratch) -> None:
    tier = DiskTier(scratch, [4096] * 3, num_buffers=2, pinned=False)
    may_read, copied = threading.Event(), threading.Event()
    tier.expect([1, 2])
    held = [tier.take(record) for record in (1, 2)]
    tier.expect([0, 1])
    for buffer, wait in zip(held, (may_read.wait, copied.set), strict=True):
        tier.drop(buffer, wait)  # the first read waits, and the second read is queued
    tier.expect([1, 0])
    tier.expect([0])
    assert not copied.is_set()
    tier.blank(2)
    assert copied.is_set()
    may_read.set()
    tier.close()


@given(sizes=st.lists(st.integers(0, 2**22), min_size=1, max_size=30))
def test_pinned_allocations_are_powers_of_two_with_little_waste(sizes: list[int]) -> None:
    starts = [0, *accumulate(padded(size) for size in sizes)]
    slabs = _slabs(starts)
    assert sum(num_records for _, num_records in slabs) == len(sizes)
    first = 0
    for num_bytes, num_records in slabs:
        assert num_bytes.bit_count() == 1
        assert starts[first + num_records] - starts[first] <= num_bytes
        first += num_records
    total = sum(num_bytes for num_bytes, _ in slabs)
    assert total <= max(4096, 2 ** (starts[-1] - 1).bit_length())  # all records have one allocation


def test_pinned_allocations_of_many_equal_records() -> None:
    starts = [index * 144 * 2**20 for index in range(27)]
    assert sum(num_bytes for num_bytes, _ in _slabs(starts)) <= 1.11 * starts[-1]


def test_the_reader_changes_buffers_only_with_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch(tmp_path)
    tier = DiskTier(scratch, [2**20] * 6, 3, False)
    fill, lock = DiskTier._fill, scratch.transfers.changed
    by_reader: list[bool] = []

    def watched_fill(self: DiskTier) -> None:
        if threading.current_thread() is not threading.main_thread():
            by_reader.append(lock._is_owned())  # type: ignore[attr-defined]
        fill(self)

    monkeypatch.setattr(DiskTier, "_fill", watched_fill)
    for record in range(6):
        tier.put(record, tier.blank(record))
    for number in range(300):  # most of the expected reads are running when they are replaced
        tier.expect([number % 6, (number + 1) % 6])
        tier.drop(tier.take((number + 3) % 6))
    tier.close()
    scratch.close()
    assert by_reader
    assert all(by_reader)
