"""Addresses of remote storage: how they are recognized, and what a wrong address raises."""

import sys
from pathlib import Path

import pytest

from roomier.core.errors import CheckpointError, RoomierError
from roomier.storage.address import filesystem, is_remote, located


def test_addresses_are_told_from_paths() -> None:
    """An address stays text, even if it was passed as a Path; file:// and everything else becomes a Path."""
    assert located("root", "s3://bucket//runs/") == "s3://bucket/runs"
    assert located("root", Path("gs://bucket/runs")) == "gs://bucket/runs"
    assert located("root", "file:///tmp/a%20b") == Path("/tmp/a b")
    assert located("root", "s3:/runs") == Path("s3:/runs")
    assert is_remote("memory://a")
    assert not any(map(is_remote, ("file:///tmp", "runs", None)))


def test_wrong_addresses_name_the_field_and_the_next_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown protocol names the known ones, and a missing package names the extra."""
    with pytest.raises(RoomierError, match=r"root='s4://a': .* Did you mean 's3://'\?"):
        located("root", "s4://a")
    with pytest.raises(CheckpointError, match=r"root='s3://': is an address without a bucket"):
        located("root", "s3://", CheckpointError)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(RoomierError, match=r"root='s3://a/b': .*pip install 'roomier\[s3\]'"):
        filesystem("s3://a/b", "root")


def test_the_file_system_of_an_address() -> None:
    """What is written under an address is read under its path in the file system."""
    system, path = filesystem("memory://bucket/runs/a")
    system.pipe_file(path, b"content", mode="create")
    assert system.cat_file(path) == b"content"
    with pytest.raises(FileExistsError):
        system.pipe_file(path, b"other", mode="create")
