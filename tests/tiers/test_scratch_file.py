"""The scratch file: folders, locks, removal, full disks, and errors of transfers."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier.core.errors import TierError
from roomier.techniques.tiers import folder as folders
from roomier.techniques.tiers import scratch as scratches
from roomier.techniques.tiers.disk import DiskTier
from roomier.techniques.tiers.scratch import FileTransfer, Scratch
from tests.covering import few

NOT_A_FOLDER = {
    "missing": (lambda path: path / "missing", "does not exist"),
    "a file": (lambda path: Path(__file__), "is not a folder"),
    "read-only": (lambda path: Path("/proc"), "is not writable|does not allow"),  # the second for root
}


def threads_of_transfers() -> set[threading.Thread]:
    """Return the threads of this test and of earlier tests. A Trainer that has not been garbage-collected keeps the
    threads of its file."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("roomier-")}


def filled(scratch: Scratch) -> DiskTier:
    """Return a tier with three records."""
    tier = DiskTier(scratch, [5000] * 3, num_buffers=2, pinned=False)
    for record in range(3):
        tier.put(record, tier.blank(record).fill_(record))
    tier.settle()
    return tier


def test_the_file_is_private_and_is_removed_with_its_threads(tmp_path: Path) -> None:
    before = threads_of_transfers()
    scratch = Scratch(tmp_path)
    assert list(tmp_path.iterdir()) == [scratch.path]
    assert scratch.path.stat().st_mode & 0o777 == 0o600
    tiers = [filled(scratch), filled(scratch)]
    assert scratch.path.stat().st_size == scratch.reserved_bytes == 4096 + 2 * 3 * 8192
    assert scratch.path.stat().st_blocks * 512 >= scratch.reserved_bytes
    assert len(threads_of_transfers() - before) == 2
    assert [int(tier.take(1)[0]) for tier in tiers] == [1, 1]
    for tier in tiers:
        tier.close()
    for _ in range(2):
        scratch.close()
    assert list(tmp_path.iterdir()) == []
    assert threads_of_transfers() <= before


@pytest.mark.parametrize("case", NOT_A_FOLDER)
def test_unusable_folders_are_rejected(case: str, tmp_path: Path) -> None:
    place, problem = NOT_A_FOLDER[case]
    before = threads_of_transfers()
    with pytest.raises(TierError, match=problem) as error:
        Scratch(place(tmp_path))
    assert "offload={'folder': ...}" in error.value.action
    assert threads_of_transfers() <= before


def test_a_run_does_not_remove_the_file_of_a_different_run(tmp_path: Path) -> None:
    first, second = Scratch(tmp_path), Scratch(tmp_path)
    assert {first.path, second.path} == set(tmp_path.iterdir())
    tiers = [filled(first), filled(second)]
    first.close()
    assert int(tiers[1].take(2)[0]) == 2
    second.close()


def test_a_file_that_a_different_run_locks_first_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(file: int) -> bool:
        monkeypatch.setattr(scratches, "lock", folders.lock)
        folders.remove_abandoned(tmp_path)  # the other run has locked and removed the new file
        return folders.lock(file)

    monkeypatch.setattr(scratches, "lock", lost)
    scratch = Scratch(tmp_path)
    assert list(tmp_path.iterdir()) == [scratch.path]
    scratch.close()


KILLED = """
import os, signal, sys
from roomier.techniques.tiers.scratch import Scratch
scratch = Scratch(sys.argv[1])
scratch.reserve(2**20)
print(scratch.path, flush=True)
os.kill(os.getpid(), signal.{signal})
"""


@pytest.mark.parametrize("name", few(["SIGKILL", "SIGUSR1"]))
def test_files_of_killed_runs_are_removed_by_the_next_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED.format(signal=name), str(tmp_path)], stdout=subprocess.PIPE)
    assert killed.returncode == -signal.Signals[name]
    left = Path(killed.stdout.decode().strip())
    assert list(tmp_path.iterdir()) == [left]
    (tmp_path / "data.scratch").write_text("a file of the user")
    Scratch(tmp_path).close()
    assert f"removed {left}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data.scratch"]


NOT_CLOSED = """
import sys, threading, torch
from roomier.techniques.tiers.buffers import allocate
from roomier.techniques.tiers.scratch import Scratch
from roomier.techniques.tiers.scratch import FileTransfer

def compute():
    started.set()
    values = torch.ones(2**18)
    for _ in range(2000):
        values.mul_(1.0)
    print("complete", flush=True)

started = threading.Event()
scratch = Scratch(sys.argv[1])
scratch.transfers.write(FileTransfer(allocate(4096, pinned=False), scratch.reserve(4096), finish=compute))
started.wait()
1 / 0
"""


def test_a_program_that_ends_without_close_completes_the_transfer_and_removes_the_file(tmp_path: Path) -> None:
    """If a thread computes while the interpreter ends, the process must not abort."""
    run = subprocess.run([sys.executable, "-c", NOT_CLOSED, str(tmp_path)], capture_output=True, text=True)
    assert "ZeroDivisionError" in run.stderr
    assert (run.returncode, run.stdout) == (1, "complete\n"), run.stderr
    assert list(tmp_path.iterdir()) == []


def test_forked_processes_leave_the_file_unchanged(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    tier = filled(scratch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about threads
        child = os.fork()
    if child == 0:
        try:
            tier.expect([0])
        except AssertionError:
            scratch.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert int(tier.take(1)[0]) == 1
    assert scratch.path.exists()
    scratch.close()


@pytest.mark.parametrize("limit", ["free", "allocation"])
def test_a_full_disk_is_reported_before_the_run(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == "free":
        monkeypatch.setattr(folders.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 9, 9, 9, 0, 0, 0, 0, 255)))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        reason = {
            "free": "has only 36.0 KiB free",
            "allocation": r"may have at most 1.0 MiB; raise this limit \(`ulimit -f`\)",
        }[limit]
        with pytest.raises(TierError, match=f"the scratch file requires 8.0 MiB, but .*{reason}") as e:
            DiskTier(scratch, [2**23], 1, pinned=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.undo()
    assert e.value.received == str(tmp_path)
    assert scratch.path.stat().st_size == scratch.reserved_bytes == 4096
    filled(scratch)  # the file is usable
    scratch.close()


def failing(tier: DiskTier, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, fail)


DAMAGES: dict[str, Callable[[DiskTier, Scratch, pytest.MonkeyPatch], object]] = {
    "truncated": lambda tier, scratch, patch: os.truncate(scratch.path, 6000),
    "reads fail": lambda tier, scratch, patch: failing(tier, patch, "preadv"),
    "writes fail": lambda tier, scratch, patch: failing(tier, patch, "pwritev"),
}
CALLS: dict[str, Callable[[DiskTier], object]] = {
    "take": lambda tier: tier.take(2),
    "expect": lambda tier: (tier.expect([0, 1, 2]), tier.take(0)),
    "put": lambda tier: (tier.put(0, tier.blank(0)), tier.settle()),
    "read after write": lambda tier: (tier.put(1, tier.blank(1)), tier.take(1)),
    "blank": lambda tier: [tier.put(0, tier.blank(0)) for _ in range(9)],
    "mapped": lambda tier: tier.mapped(2),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("damage", "call"),
    [
        *(("truncated", call) for call in CALLS),
        *(("reads fail", call) for call in ("take", "expect", "read after write")),
        *(("writes fail", call) for call in ("put", "blank", "read after write")),
    ],
)
def test_errors_of_transfers_are_raised_in_the_caller(
    damage: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threads_of_transfers()
    scratch = Scratch(tmp_path)
    tier = filled(scratch)
    DAMAGES[damage](tier, scratch, monkeypatch)
    with pytest.raises(TierError, match=r"The file has 28.0 KiB; its folder has \S+ \w+ free") as error:
        CALLS[call](tier)
    assert error.value.received == str(scratch.path)
    assert ("truncated" if damage == "truncated" else "Input/output error") in error.value.problem
    if call != "mapped":
        with pytest.raises(TierError):
            tier.expect([0])
    tier.close()
    scratch.close()
    assert threads_of_transfers() <= before


@pytest.mark.timeout(60)
def test_callers_do_not_wait_for_a_thread_that_has_ended(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)

    def then() -> None:
        raise MemoryError

    scratch.transfers.write(FileTransfer(torch.zeros(4096, dtype=torch.uint8), scratch.reserve(4096), then=then))
    with pytest.raises(MemoryError):
        scratch.wait_for(lambda: False)
    scratch.close()


def test_an_error_of_a_wait_function_is_raised_in_the_caller(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    tier = filled(scratch)

    def wait() -> None:
        raise RuntimeError("the device failed")

    tier.put(0, tier.blank(0), wait=wait)
    with pytest.raises(RuntimeError, match="the device failed"):
        tier.settle()
    scratch.close()


def test_a_removed_file_remains_usable(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    tier = filled(scratch)
    scratch.path.unlink()
    tier.put(0, tier.blank(0).fill_(7))
    assert int(tier.take(0)[-1]) == 7
    scratch.close()


def test_content_is_the_same_without_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    scratch = Scratch(tmp_path)
    assert not scratch.is_direct
    assert "has no direct I/O" in capsys.readouterr().err
    tier = filled(scratch)
    assert [int(tier.take(record)[-1]) for record in (2, 0)] == [2, 0]
    scratch.close()


@pytest.mark.parametrize("rounds", [3])
def test_mapped_records_agree_with_direct_transfers(rounds: int, tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    sizes = [2**22 + 5000, 2**22]
    tier = DiskTier(scratch, sizes, num_buffers=2, pinned=False)
    for step in range(rounds):
        for record in range(2):
            tier.put(record, tier.blank(record).fill_(step * 2 + record))
        tier.settle()
        mapped = [tier.mapped(record) for record in range(2)]
        assert all(mapped[record].eq(step * 2 + record).all() for record in range(2))
        expected = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        for target, source in zip(mapped, expected, strict=True):
            target.copy_(source)
        for record in range(2):
            buffer = tier.take(record)
            assert torch.equal(buffer, expected[record])
            tier.drop(buffer)
    scratch.close()


def test_default_folder_is_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {tmp_path: "tmpfs"}
    monkeypatch.setattr(folders, "file_system_of", lambda folder: kinds.get(folder, "ext4"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert folders.offload_folder(None) == tmp_path / "cache" / "roomier" / "offload"
    assert f"offloaded data is stored in {tmp_path / 'cache'}" in capsys.readouterr().err
    kinds[tmp_path] = "ext4"
    assert folders.offload_folder(None) == tmp_path
    for kind, words in {
        "tmpfs": "does not free host memory",
        "nfs4": "network file system",
        "fuse.sshfs": "network",
    }.items():
        kinds[tmp_path] = kind
        assert folders.offload_folder(str(tmp_path)) == tmp_path
        assert words in capsys.readouterr().err


def test_file_system_of_a_folder(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\ntmpfs {tmp_path}/with\\040space tmpfs rw 0 0\n"
        f"/dev/b {tmp_path}/with xfs rw 0 0\n/dev/c {tmp_path}/twice xfs rw 0 0\n/dev/d {tmp_path}/twice btrfs rw 0 0\n"
    )
    names = {".": "nfs4", "with": "xfs", "with space/deep": "tmpfs", "without": "nfs4", "..": "ext4", "twice": "btrfs"}
    assert {name: folders.file_system_of(tmp_path / name, mounts) for name in names} == names
    assert folders.file_system_of(tmp_path, tmp_path / "missing") is None


def overwrite(path: Path, position: int, content: bytes = b"\xff") -> None:
    """Write to the file as another program would."""
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        file.write(content)
        os.fsync(file.fileno())


@pytest.mark.parametrize("call", ["take", "expect", "part", "mapped"])
def test_overwritten_bytes_are_an_error_that_names_the_file(call: str, tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    tier = filled(scratch)
    if call == "mapped":
        assert tier.mapped(2).eq(2).all()  # no byte is written, so the checksums remain valid
        tier.expect([])
    overwrite(scratch.path, 4096 + 2 * 8192 + 4000)  # in the first page of the last record
    for record in (0, 1):
        buffer = tier.take(record)
        assert buffer.eq(record).all()
        tier.drop(buffer)
    if call == "expect":
        tier.expect([2])
    with pytest.raises(TierError, match="is damaged: the bytes from position 20480 changed") as error:
        tier.take(2, 4096 if call == "part" else None)
    assert error.value.received == str(scratch.path)
    assert "resume from the last checkpoint" in error.value.action
    tier.close()
    scratch.close()


def test_a_record_that_is_written_while_its_unused_read_runs_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Scratch(tmp_path)
    tier = filled(scratch)
    has_read, may_check, check = threading.Event(), threading.Event(), scratch.sums.check

    def late(*arguments: Any) -> None:
        has_read.set()
        may_check.wait()
        check(*arguments)

    monkeypatch.setattr(scratch.sums, "check", late)
    tier.expect([1])
    has_read.wait()
    tier.put(1, tier.blank(1).fill_(9))
    threading.Timer(0.2, may_check.set).start()
    tier.settle()
    assert tier.take(1).eq(9).all()
    tier.close()
    scratch.close()


@pytest.mark.parametrize("is_recorded", [True, False])
def test_records_that_code_changes_through_a_mapping_are_not_damaged(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_recorded:  # as with tmpfs
        monkeypatch.setattr(Scratch, "_is_write_recorded", lambda _: False)
    scratch = Scratch(tmp_path)
    tier = filled(scratch)
    tier.mapped(1)[17] = 99
    buffer = tier.take(1)
    assert (int(buffer[16]), int(buffer[17])) == (1, 99)
    tier.put(1, buffer)
    tier.settle()
    overwrite(scratch.path, 4096 + 8192)
    with pytest.raises(TierError, match="changed after they were written"):
        tier.take(1)  # the write stored the checksums again
    tier.close()
    scratch.close()
