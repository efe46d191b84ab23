import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from roomier.core.errors import DataError
from roomier.core.replacing import replacing_path
from roomier.data import TokenDataset, tokens, write_tokens
from roomier.data.source import Source


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    """Tokens 0 to 99 in one document."""
    path = tmp_path / "hundred.tokens"
    assert write_tokens(path, [range(100)], vocab_size=100, end_of_document=None) == 100
    return path


@pytest.mark.parametrize(("vocab_size", "token_bytes"), [(50, 2), (65536, 2), (65537, 4), (1 << 32, 4)])
def test_round_trip(tmp_path: Path, vocab_size: int, token_bytes: int):
    path = tmp_path / "new folder" / "some.tokens"
    largest = vocab_size - 1
    documents = [[1, 2, 3], np.array([largest, 4]), (), np.array([5], dtype=np.uint8)]
    num_tokens = write_tokens(path, iter(documents), vocab_size=vocab_size, end_of_document=0)
    assert num_tokens == 10
    assert path.stat().st_size == 64 + 10 * token_bytes
    tokens = TokenDataset(path, 10, labels="same")
    assert tokens[0]["input_ids"].tolist() == [1, 2, 3, 0, largest, 4, 0, 0, 5, 0]
    assert (tokens.num_tokens, tokens.vocab_size, tokens.end_of_document) == (10, vocab_size, 0)
    assert os.listdir(path.parent) == ["some.tokens"]


def test_documents_are_not_separated_without_end_of_document(tmp_path: Path):
    assert write_tokens(tmp_path / "plain", [[1, 2], [3]], vocab_size=5) == 3
    dataset = TokenDataset(tmp_path / "plain", 3, labels="same")
    assert dataset.end_of_document is None
    assert dataset[0]["input_ids"].tolist() == [1, 2, 3]


def test_targets_follow_the_inputs(hundred: Path):
    blocks = TokenDataset(hundred, 8)
    assert len(blocks) == 12
    for number, item in enumerate(blocks[i] for i in range(len(blocks))):
        begin = number * 8
        assert item["input_ids"].tolist() == list(range(begin, begin + 8))
        assert item["targets"].tolist() == list(range(begin + 1, begin + 9))
        assert item["input_ids"].dtype == item["targets"].dtype == torch.int64
        assert set(item) == {"input_ids", "targets"}


def test_same_labels_are_equal_and_not_shared(hundred: Path):
    item = TokenDataset(hundred, 8, labels="same")[1]
    assert set(item) == {"input_ids", "labels"}
    assert torch.equal(item["input_ids"], item["labels"])
    item["input_ids"].zero_()
    assert item["labels"].tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    ("block_size", "stride", "labels", "length"),
    [
        (99, None, "shifted", 1),
        (100, None, "same", 1),
        (50, None, "same", 2),
        (50, None, "shifted", 1),
        (10, 5, "shifted", 18),
        (10, 30, "same", 4),
    ],
)
def test_length(hundred: Path, block_size: int, stride: int | None, labels: Any, length: int):
    blocks = TokenDataset(hundred, block_size, stride=stride, labels=labels)
    assert len(blocks) == length
    last = blocks[-1]["input_ids"]
    assert last[0] == (length - 1) * (stride or block_size)
    assert len(last) == block_size
    for outside in (length, -length - 1):
        with pytest.raises(IndexError):
            blocks[outside]


def test_getitems_is_equal_to_single_items(hundred: Path):
    blocks = TokenDataset(hundred, 8, stride=3)
    for one, many in zip([blocks[i] for i in (5, 0, 2)], blocks.__getitems__([5, 0, 2]), strict=True):
        assert one.keys() == many.keys()
        assert all(torch.equal(one[key], many[key]) for key in one)


def test_inputs_and_targets_share_no_memory(hundred: Path):
    items = TokenDataset(hundred, 8).__getitems__([0, 1])
    items[0]["input_ids"].fill_(-1)
    assert items[0]["targets"].tolist() == list(range(1, 9))
    assert items[1]["input_ids"].tolist() == list(range(8, 16))


def test_pickle_is_small_and_can_be_read(hundred: Path):
    blocks = TokenDataset(hundred, 8)
    first = blocks[0]["input_ids"]
    packed = pickle.dumps(blocks)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed)[0]["input_ids"], first)


def test_workers_and_resume(hundred: Path):
    def make() -> Source:
        loader = DataLoader(TokenDataset(hundred, 4), batch_size=5, shuffle=True, num_workers=1)
        return Source(loader, name="train", seed=0)

    first, second = make(), make()
    batches = first.start(0)
    next(batches)
    second.load_state_dict(first.state_dict())
    rest, resumed = list(batches), list(second.start(0))
    assert len(rest) == len(resumed) == 4
    assert all(torch.equal(a["targets"], b["targets"]) for a, b in zip(rest, resumed, strict=True))


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([1, 100], r"documents\[1\]\[1\]=100: must be an id of the vocabulary"),
        ([-1], r"documents\[1\]\[0\]=-1: must be an id of the vocabulary"),
        ([1.5], r"documents\[1\]=.*must be a flat sequence"),
        ("text", r"documents\[1\]='text'.*must be a flat sequence"),
        ([[1, 2], [3]], r"documents\[1\]=.*must be a flat sequence"),
        ([[1, 2]], r"documents\[1\]=.*must be a flat sequence"),
        ([True], r"documents\[1\]=.*must be a flat sequence"),
    ],
)
def test_invalid_documents_do_not_change_the_old_file(hundred: Path, document: Any, field: str):
    before = hundred.read_bytes()
    with pytest.raises(DataError, match=field):
        write_tokens(hundred, [[1, 2], document], vocab_size=100, end_of_document=0)
    assert hundred.read_bytes() == before
    assert os.listdir(hundred.parent) == [hundred.name]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"vocab_size": 0, "end_of_document": None}, "vocab_size=0"),
        ({"vocab_size": 2**32 + 1, "end_of_document": None}, "vocab_size="),
        ({"vocab_size": "50k", "end_of_document": None}, "vocab_size='50k'"),
        ({"vocab_size": 10, "end_of_document": 10}, "end_of_document=10"),
        ({"vocab_size": 10, "end_of_document": -1}, "end_of_document=-1"),
        ({"vocab_size": 10, "end_of_document": "</s>"}, "end_of_document='</s>'"),
    ],
)
def test_wrong_vocabulary(tmp_path: Path, options: dict[str, Any], field: str):
    with pytest.raises(DataError, match=field):
        write_tokens(tmp_path / "a.tokens", [[1]], **options)


@pytest.mark.parametrize("documents", [[], [[], ()]])
def test_no_tokens(tmp_path: Path, documents: Any):
    with pytest.raises(DataError, match=r"documents=.*contain no tokens"):
        write_tokens(tmp_path / "a.tokens", documents, vocab_size=10, end_of_document=None)
    assert os.listdir(tmp_path) == []


def test_path_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"path=.*cannot be written"):
        write_tokens(tmp_path / "file" / "a.tokens", [[1]], vocab_size=10, end_of_document=None)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"path=.*cannot be written"):
        write_tokens(tmp_path / "folder", [[1]], vocab_size=10, end_of_document=None)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_full_disk_raises_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")

    # The temporary file is a link to a device on which each write fails because no space is left.
    @contextmanager
    def on_full_disk(path: Path) -> Iterator[Path]:
        with replacing_path(path) as aside:
            aside.symlink_to(full)
            yield aside

    monkeypatch.setattr(tokens, "replacing_path", on_full_disk)
    with pytest.raises(DataError, match="No space left"):
        write_tokens(tmp_path / "a.tokens", [range(100)] * 1000, vocab_size=100, end_of_document=None)
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_documents_is_not_converted(tmp_path: Path):
    def documents() -> Iterator[list[int]]:
        yield [1]
        (tmp_path / "missing.txt").read_text()

    with pytest.raises(FileNotFoundError):
        write_tokens(tmp_path / "a.tokens", documents(), vocab_size=10, end_of_document=None)
    assert os.listdir(tmp_path) == []


def test_missing_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"path=.*does not exist"):
        TokenDataset(tmp_path / "none.tokens", 8)


def test_folder_instead_of_a_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"path=.*cannot be read"):
        TokenDataset(tmp_path, 8)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: np.arange(100, dtype=np.uint16).tobytes(), "is not a token file"),
        (lambda data: b"", "is not a token file"),
        (lambda data: data[:30], "has an incomplete header of 30 bytes"),
        (lambda data: data[:-2], "was truncated or extended"),
        (lambda data: data + b"\0", "was truncated or extended"),
        (lambda data: data[:8] + b"\x02" + data[9:], "format version 2"),
        (lambda data: data[:12] + b"\x03" + data[13:], "3 bytes per token"),
    ],
)
def test_damaged_file(hundred: Path, damage: Any, problem: str):
    hundred.write_bytes(damage(hundred.read_bytes()))
    with pytest.raises(DataError, match=problem):
        TokenDataset(hundred, 8)


@pytest.mark.parametrize(("labels", "most"), [("shifted", 99), ("same", 100)])
def test_block_larger_than_the_file(hundred: Path, labels: Any, most: int):
    with pytest.raises(DataError, match=f"block_size={most + 1}: .* Use at most {most} "):
        TokenDataset(hundred, most + 1, labels=labels)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 2.0}, "block_size=2.0"),
        ({"block_size": 4, "stride": 0}, "stride=0"),
        ({"block_size": 4, "labels": "next"}, "labels='next'"),
    ],
)
def test_wrong_options(hundred: Path, options: dict[str, Any], field: str):
    with pytest.raises(DataError, match=field):
        TokenDataset(hundred, **options)
