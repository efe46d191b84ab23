"""Atomic commit of a checkpoint folder, with kills, full disks, and folders that cannot be written."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from roomier import checkpoint
from roomier.checkpoint import commit
from roomier.core.errors import CheckpointError

NUM_BYTES = 4 * 2**18


def state_of(step: int, num_bytes: int = 64) -> dict:
    return {"w": torch.full((num_bytes // 4,), float(step)), "progress": {"global_step": step}}


def step_in(path: Path) -> int:
    return checkpoint.load(path)["progress"]["global_step"]


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def aside_of(kind: str, target: Path, pid: int | None = None, host: str | None = None) -> Path:
    pid = dead_pid() if pid is None else pid
    return target.with_name(f".{kind}-{target.name}@{host or commit.this_host()}-{pid}-0123abcd")


def test_kill_9_always_leaves_the_last_complete_checkpoint_loadable(tmp_path):
    script = Path(__file__).with_name("killed_while_saving.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["num_calls"] > 10
    assert seen["num_steps"] > 0


def test_save_creates_parents_and_leaves_no_other_files(tmp_path):
    path = tmp_path / "runs" / "version_0" / "checkpoints" / "step=1.ckpt"
    checkpoint.save(path, state_of(1))
    checkpoint.save(str(path), state_of(2))
    assert os.listdir(path.parent) == ["step=1.ckpt"]
    assert step_in(path) == 2


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("c", state_of(1))
    assert step_in(Path("c")) == 1
    assert checkpoint.find_last(".") == Path("c")
    checkpoint.remove("c")
    assert os.listdir(tmp_path) == []


def test_a_tilde_is_expanded_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    checkpoint.save("~/runs/c", state_of(1))
    assert step_in(tmp_path / "home" / "runs" / "c") == step_in(Path("~/runs/c")) == 1
    assert checkpoint.peek("~/runs/c")["progress"] == {"global_step": 1}
    assert checkpoint.find_last("~/runs") == tmp_path / "home" / "runs" / "c"
    saver = checkpoint.BackgroundSaver()
    saver.start("~/runs/d", state_of(2))
    saver.wait()
    assert checkpoint.list_complete("~/runs") == [tmp_path / "home" / "runs" / name for name in "cd"]
    checkpoint.remove("~/runs/c")
    assert os.listdir(tmp_path) == ["home"]
    assert os.listdir(tmp_path / "home" / "runs") == ["d"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_unsupported_fsync_of_folders_is_ignored_and_a_failed_fsync_raises(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def of_files_alone(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    if number == errno.EINVAL:
        checkpoint.save(tmp_path / "c", state_of(1))
        assert step_in(tmp_path / "c") == 1
    else:
        with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
            checkpoint.save(tmp_path / "c", state_of(1))


def test_an_empty_folder_and_a_damaged_checkpoint_are_replaced(tmp_path):
    path = tmp_path / "c"
    path.mkdir()
    checkpoint.save(path, state_of(1))
    (path / "run.json").write_text("")
    checkpoint.save(path, state_of(2))
    assert step_in(path) == 2
    assert os.listdir(tmp_path) == ["c"]


def test_other_files_are_never_overwritten_or_removed(tmp_path):
    folder, file = tmp_path / "thesis", tmp_path / "notes.txt"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("years of work")
    file.write_text("notes")
    for path in (folder, file):
        with pytest.raises(CheckpointError, match=r"path='.*': exists and is not a checkpoint"):
            checkpoint.save(path, state_of(1))
        with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no run\.json"):
            checkpoint.remove(path)
    assert (folder / "chapter1.tex").read_text() == "years of work"
    assert file.read_text() == "notes"
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "thesis"]


def test_remove(tmp_path):
    checkpoint.save(tmp_path / "a", state_of(1))
    checkpoint.save(tmp_path / "b", state_of(2))
    checkpoint.remove(tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.remove(tmp_path / "b")


def test_an_interrupted_removal_leaves_no_checkpoint_at_the_path(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "a", state_of(1))

    class KilledError(BaseException):
        pass

    def killed(folder):
        raise KilledError

    monkeypatch.setattr(commit, "_delete", killed)
    with pytest.raises(KilledError):
        checkpoint.remove(tmp_path / "a")
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".tmp-a@")
    assert checkpoint.list_complete(tmp_path) == []
    assert checkpoint.find_last(tmp_path) is None


@pytest.mark.more
def test_leftovers_of_dead_processes_are_cleared_and_folders_of_live_processes_remain(tmp_path):
    living = subprocess.Popen(["sleep", "60"])
    try:
        here = tmp_path / "c"
        stale = aside_of("tmp", here)
        of_a_living_process = aside_of("tmp", here, pid=living.pid)
        elsewhere = aside_of("tmp", here, host="00000000")
        foreign = tmp_path / ".tmp-something-else"
        for folder in (stale, of_a_living_process, elsewhere, foreign):
            folder.mkdir()
            (folder / "shard.safetensors").write_bytes(b"half")
        checkpoint.save(here, state_of(1))
        assert not stale.exists()
        assert {path.name for path in tmp_path.iterdir()} == {
            "c",
            of_a_living_process.name,
            elsewhere.name,
            foreign.name,
        }
    finally:
        living.kill()
        living.wait()


@pytest.mark.more
def test_a_reused_process_id_does_not_keep_a_stale_folder(tmp_path):
    folder_older_than_the_process = Path(os.__file__).parent
    with subprocess.Popen(["sleep", "60"]) as process:
        stale, live = (
            commit._Aside(path, "tmp", tmp_path / "c", commit.this_host(), process.pid).is_stale()
            for path in (folder_older_than_the_process, tmp_path)
        )
        process.kill()
    assert (stale, live) == (True, False)


@pytest.mark.more
def test_a_zombie_process_counts_as_dead(tmp_path):
    with subprocess.Popen(["true"]) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        left = aside_of("tmp", tmp_path / "c", pid=process.pid)
        left.mkdir()
        checkpoint.save(tmp_path / "c", state_of(1))
        assert os.listdir(tmp_path) == ["c"]


def test_between_the_two_renames_the_old_checkpoint_is_found_and_later_renamed_back(tmp_path):
    path = tmp_path / "last"
    checkpoint.save(path, state_of(1))
    replaced = aside_of("old", path)
    path.rename(replaced)
    assert checkpoint.find_last(tmp_path) == replaced
    assert checkpoint.list_complete(tmp_path) == [replaced]
    assert step_in(path) == 1
    checkpoint.verify(path)
    assert checkpoint.peek(path)["progress"] == {"global_step": 1}

    checkpoint.save(tmp_path / "other", state_of(2))
    assert sorted(os.listdir(tmp_path)) == ["last", "other"]
    assert step_in(path) == 1


def test_a_superseded_checkpoint_is_not_listed_and_is_deleted_later(tmp_path):
    path = tmp_path / "last"
    checkpoint.save(path, state_of(1))
    path.rename(aside_of("old", path))
    os.rename(_written_elsewhere(tmp_path, state_of(2)), path)
    assert checkpoint.list_complete(tmp_path) == [path]
    checkpoint.save(tmp_path / "other", state_of(3))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "last", "other"]
    assert step_in(path) == 2


def _written_elsewhere(tmp_path: Path, state: dict) -> Path:
    checkpoint.save(tmp_path / "elsewhere" / "c", state)
    return tmp_path / "elsewhere" / "c"


def test_deletion_starts_with_the_record(tmp_path, monkeypatch):
    path = tmp_path / "last"
    checkpoint.save(path, state_of(1))
    monkeypatch.setattr(commit.shutil, "rmtree", lambda *args, **kwargs: None)
    checkpoint.save(path, state_of(2))
    (superseded,) = tmp_path.glob(".old-*")
    assert not (superseded / "run.json").exists()
    checkpoint.remove(path)
    assert checkpoint.find_last(tmp_path) is None


def test_a_link_is_replaced_and_its_target_is_kept(tmp_path):
    target, link = tmp_path / "step=1", tmp_path / "last"
    checkpoint.save(target, state_of(1))
    link.symlink_to(target)
    checkpoint.save(link, state_of(2))
    assert sorted(os.listdir(tmp_path)) == ["last", "step=1"]
    assert (step_in(target), step_in(link)) == (1, 2)
    assert not link.is_symlink()


def test_ctrl_c_between_the_two_renames_restores_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last"
    checkpoint.save(path, state_of(1))
    rename = os.rename

    def interrupted(source, target):
        if Path(target) == path and ".tmp-" in str(source):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, state_of(2))
    assert os.listdir(tmp_path) == ["last"]
    assert step_in(path) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
def test_an_interrupt_while_tensors_are_written_is_not_converted(tmp_path, monkeypatch, error):
    def interrupted(*args, **kwargs):
        raise error

    path = tmp_path / "c"
    checkpoint.save(path, state_of(1))
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(type(error)):
        checkpoint.save(path, state_of(2))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["c"]
    assert step_in(path) == 1


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("only root can mount a small disk; another test uses a limit on the size of a file instead")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk(small_disk):
    checkpoint.save(small_disk / "good", state_of(1))
    for target in ("new", "good"):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(small_disk / target, state_of(2, NUM_BYTES))
        assert caught.value.field == "path"
        assert caught.value.received == str(small_disk / target)
        reason = f"No space left on device. The checkpoint requires 1.0 MiB, but {small_disk} has only 1016.0 KiB free"
        assert reason in caught.value.problem
        assert "Free some space" in caught.value.action
        assert os.listdir(small_disk) == ["good"]
    assert step_in(small_disk / "good") == 1


@pytest.mark.parametrize("limit_bytes", [NUM_BYTES // 2, 100])
def test_a_limit_on_the_size_of_a_file(tmp_path, limit_bytes):
    checkpoint.save(tmp_path / "good", state_of(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path / "good", state_of(2, NUM_BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.strerror(errno.EFBIG) in caught.value.problem
    assert os.listdir(tmp_path) == ["good"]
    assert step_in(tmp_path / "good") == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("a regular file")
    for path in (tmp_path / "file" / "c", tmp_path / "file" / "deep" / "c", Path("/proc/not/here")):
        with pytest.raises(
            CheckpointError, match=r"cannot be written: .*Choose a folder that this process can write to"
        ):
            checkpoint.save(path, state_of(1))
    with pytest.raises(CheckpointError, match=r"cannot be written: File name too long .*Choose a shorter name"):
        checkpoint.save(tmp_path / ("x" * 250), state_of(1))
    assert os.listdir(tmp_path) == ["file"]


def test_threads_can_save_at_the_same_time(tmp_path):
    checkpoint.save(tmp_path / "warm", state_of(0))
    errors: list[BaseException] = []

    def save(step: int) -> None:
        try:
            checkpoint.save(tmp_path / str(step), state_of(step))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(step,)) for step in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [step_in(tmp_path / str(step)) for step in range(1, 5)] == [1, 2, 3, 4]
