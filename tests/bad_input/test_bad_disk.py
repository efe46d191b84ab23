"""Folders that are not writable and full disks: the run ends, and its checkpoints can be resumed elsewhere."""

import resource
import subprocess
from contextlib import contextmanager, suppress

import pytest

from roomier import checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import CheckpointError

pytestmark = pytest.mark.more

WIDE = 6000  # a checkpoint of a Net with this width has half a MiB


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small disk needs root; the file-size limit below covers a full one without")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@contextmanager
def files_limited_to(num_bytes):
    """Limit the size of the files that this process writes to ``num_bytes``, like a disk quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def below_a_file(desk):
    path = desk.root.parent / "notes.txt"
    path.write_text("not a folder")
    return path / "runs"


def a_file(desk):
    return below_a_file(desk).parent


FOLDERS = {
    "runs below a file": (
        lambda d: d.fit(default_root_dir=below_a_file(d)),
        "default_root_dir",
        "notes.txt/runs",
        "Pass a folder with write permission",
    ),
    "runs in a file": (
        lambda d: d.fit(default_root_dir=a_file(d)),
        "default_root_dir",
        "notes.txt",
        "Pass a folder with write permission",
    ),
    "runs in a place that accepts no folder": (
        lambda d: d.fit(default_root_dir="/proc/self/runs"),
        "default_root_dir",
        "'/proc/self/runs'",
        "Pass a folder with write permission",
    ),
    "a name too long for a folder": (
        lambda d: d.fit(default_root_dir=d.root.parent / ("x" * 300)),
        "default_root_dir",
        "xxx",
        "Pass a shorter path",
    ),
    "checkpoints below a file": (
        lambda d: d.fit(callbacks=ModelCheckpoint(dirpath=below_a_file(d))),
        "path",
        "notes.txt/runs",
        "Choose a folder that this process can write to",
    ),
    "a checkpoint below a file": (
        lambda d: d.fit().save_checkpoint(below_a_file(d)),
        "path",
        "notes.txt/runs",
        "Choose a folder that this process can write to",
    ),
    "a checkpoint with a name too long": (
        lambda d: d.fit().save_checkpoint(d.root.parent / ("x" * 300)),
        "filepath",
        "xxx",
        "Pass a shorter path",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("act", "field", "received", "action"), [pytest.param(*row, id=name) for name, row in FOLDERS.items()]
)
def test_a_folder_that_is_not_writable_is_rejected(act, field, received, action, refuses):
    refuses(act, CheckpointError, field, received, action)


def test_a_full_disk_keeps_earlier_checkpoints_and_the_run_resumes_with_space(desk, small_disk):
    keywords = {"default_root_dir": small_disk, "max_epochs": 3}
    with pytest.raises(
        CheckpointError, match=r"(?s)No space left.*Free some space.*Existing checkpoints are unchanged"
    ) as caught:
        desk.fit(desk.Net(WIDE), callbacks=ModelCheckpoint(save_top_k=-1, every_n_train_steps=1), **keywords)
    assert caught.value.field == "path"
    folder = small_disk / "version_0" / "checkpoints"
    kept = checkpoint.list_complete(folder)
    assert kept
    assert sorted(kept) == sorted(folder.iterdir())
    for path in kept:
        checkpoint.verify(path)
    num_steps = checkpoint.peek(kept[-1])["progress"]["global_step"]
    assert num_steps == len(kept)
    for path in kept[:-1]:
        checkpoint.remove(path)
    resumed = desk.fit(desk.Net(WIDE), ckpt_path="last", **keywords)
    assert resumed.global_step == 12


def fill_up(disk):
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_full_from_the_start(desk, small_disk):
    fill_up(small_disk)
    with pytest.raises(CheckpointError, match=r"default_root_dir=.*No space left.*Free some space"):
        desk.fit(default_root_dir=small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_an_exceeded_quota_is_reported(desk):
    with (
        files_limited_to(2**16),
        pytest.raises(CheckpointError, match=r"path=.*File too large.*Free some space") as caught,
    ):
        desk.fit(desk.Net(WIDE), max_epochs=1)
    assert "version_1/checkpoints/epoch=0-step=4" in caught.value.received
    assert list((desk.root / "version_1" / "checkpoints").iterdir()) == []


def test_a_quota_exceeded_at_a_resume_keeps_the_files_of_the_run(desk):
    folder = desk.root / "version_0"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with files_limited_to(64), pytest.raises(CheckpointError, match=r"default_root_dir=.*File too large"):
        desk.fit(ckpt_path=desk.good)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_unwritable_log_does_not_end_the_run(desk, small_disk, capsys):
    """If the log cannot be written, the weights of a long run must still be saved."""
    net = desk.net(on_train_start=lambda self: fill_up(small_disk))
    trainer = desk.fit(net, default_root_dir=small_disk, enable_checkpointing=False, log_every_n_steps=1)
    assert trainer.global_step == 8
    told = capsys.readouterr().err
    assert "logger 'jsonl' (JSONLLogger) failed in log_metrics and is disabled" in told
    assert "No space left" in told
