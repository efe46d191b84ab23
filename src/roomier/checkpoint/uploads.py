"""Copy checkpoints and the files of a run to remote storage in the background.

[Note: all of a checkpoint or nothing]
A checkpoint is committed in the mirror first (:mod:`roomier.storage.mirror`). Then each rank sends its own files. When
all ranks have finished, rank 0 compares the sizes in the storage with the record and creates the record. A reader
ignores a folder without a record, so it never sees a part of a checkpoint. For the same reason, a checkpoint is removed
in the opposite order, starting with the record.

[Note: checkpoints of other runs]
The storage creates the record only if it does not exist, so if two runs write to the same name, one of them receives an
error. By then, however, it could already have overwritten tensors of the other run. Rank 0 therefore first creates the
file ``.claim`` with a random text, and reads it again before it creates the record. The claim of a killed run is
replaced. A run replaces and removes only checkpoints that it wrote, or that its folder contained when the run started,
for which the rules of the local folder apply.

[Note: links]
Training may replace or remove a checkpoint while a thread reads its files. Each rank therefore creates hard links to
its files in a temporary folder of the cache, and the thread reads the links.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from roomier.checkpoint.agree import together
from roomier.checkpoint.commit import absolute, remove
from roomier.checkpoint.record import MAX_RECORD_BYTES, RECORD_NAME, read_record
from roomier.core import torch_private
from roomier.core.daemon import in_daemon
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.replacing import abandoned_in, new_owner
from roomier.core.untrusted import read_regular
from roomier.storage.mirror import ENVIRONMENT_VARIABLE, cache_folder, local_of, remote_of
from roomier.storage.remote_path import RemotePath, path_of
from roomier.storage.sending import CLAIM_NAME, ConflictError, create, delete, put, read_bytes, sizes_in, write_bytes

T = TypeVar("T")

_MOST_WAITING = 2  # checkpoints that wait for their upload; each needs disk space
_MOST_FAILED = 2
_GRACE_S = 30.0
_PATIENT_S = 10.0
_PROBE_S = 60.0  # the clients repeat requests for much longer if the server does not answer
_OF_RANK = "shard-{:05}-"


@dataclass
class _Upload:
    """One checkpoint to upload.

    Attributes:
        path: the checkpoint in the mirror.
        target: its remote path.
        links: folder with links to the files that this rank sends.
        record: on rank 0, the content of the record; empty for a file of Lightning.
        is_cancelled: True if the checkpoint was removed before its upload. Only rank 0 sets and reads it.
        error: reason of the last failure.
    """

    path: Path
    target: RemotePath
    links: Path
    record: bytes
    is_cancelled: bool = False
    error: Exception | None = None


@dataclass
class _Done:
    """What rank 0 knows about the storage.

    Attributes:
        known: folders whose content was listed.
        own: checkpoints that this run may replace or remove.
        uploaded: paths in the mirror of the checkpoints that were uploaded.
        sent: modification time and size of the other files that were uploaded.
    """

    known: set[RemotePath] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    uploaded: set[Path] = field(default_factory=set)
    sent: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def know(self, *folders: RemotePath) -> None:
        """List each folder that was not listed before. The run may replace the checkpoints that it contains now."""
        for folder in set(folders) - self.known:
            with suppress(FileNotFoundError):
                self.own |= {str(each) for each in folder.iterdir()}
            self.known.add(folder)


class Uploads:
    """Uploads of one run. Every rank must call the same methods in the same order, except for :meth:`remove`.

    Args:
        ranks: ranks of the run.
        run_folder: run folder, whose other files are also uploaded if it is in a mirror; None for no folder.
        folders: folders in mirrors to which the run writes checkpoints.
        errors: ``"raise"`` to raise the error of a failed upload at the next checkpoint, or ``"warn"`` to print a
            notice and try again at the next checkpoint.
    """

    def __init__(self, ranks: Ranks, run_folder: Path | None, folders: Iterable[str | Path], errors: str) -> None:
        self._ranks = self._background = ranks
        self._folder = None if run_folder is None or remote_of(run_folder) is None else run_folder
        self._raises = errors == "raise"
        self._token = secrets.token_hex(16).encode()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._waiting: list[_Upload] = []
        self._failed: list[_Upload] = []
        self._superseded: list[RemotePath] = []
        self._is_newest_sent = True
        self._newest: _Upload | None = None
        self._done = _Done()
        self._has_waited = False
        self._error: Exception | None = None
        if not ranks.is_alone:
            group = dist.new_group(backend="gloo", group_desc=torch_private.BACKGROUND_GROUP, timeout=timedelta(days=7))
            self._background = Ranks(ranks.world, group)
        remotes = [found for found in map(remote_of, folders) if found is not None and ranks.is_zero]
        together(ranks, lambda: self._done.know(*remotes))

    @property
    def num_waiting(self) -> int:
        """Number of checkpoints that are being uploaded or wait for their upload."""
        return len(self._waiting)

    def add(self, path: Path, target: RemotePath) -> None:
        """Upload the complete checkpoint ``path`` to ``target``. Waits if too many checkpoints wait.

        Raises:
            CheckpointError: an earlier upload failed, and errors are raised.
        """
        if self._raises:
            together(self._ranks, self._raise_failure)
        self._wait_for_place()
        if self._ranks.is_zero:
            self._drop_local_copies(path)
        upload = self._linked(path, target)
        self._newest = upload
        self._waiting.append(upload)
        self._start(lambda: self._process(upload))

    def remove(self, path: Path) -> None:
        """Remove the checkpoint ``path``, a path in a mirror, from the storage after the pending uploads. Only rank 0
        calls this method."""
        target = remote_of(path)
        if target is None:
            return
        for each in [*self._waiting, *self._failed]:
            each.is_cancelled = each.is_cancelled or each.path == path
        self._start(lambda: self._remove(target))

    def own_in(self, folder: Path) -> list[Path]:
        """Return the paths in the mirror ``folder`` of the remote checkpoints that this run may remove. Only rank 0
        calls this method."""
        remote = remote_of(folder)
        found = [RemotePath(each) for each in sorted(self._done.own)]
        return [folder / each.name for each in found if each.parent == remote]

    def end(self, *, is_complete: bool) -> None:
        """Complete all uploads, and release the thread. The uploads of a failed run are given 30 s.

        Raises:
            CheckpointError: the run is complete, but its last checkpoint could not be uploaded; or any upload failed,
                and errors are raised.
        """
        self._start(self._finish)
        self._queue.put(None)
        assert self._thread is not None
        self._thread.join(_PATIENT_S if is_complete else _GRACE_S)
        if is_complete and self._thread.is_alive():
            notice(f"waiting for the upload of {self.num_waiting} checkpoint(s) to complete")
            self._thread.join()
        if not self._thread.is_alive():
            if self._background is not self._ranks and dist.is_initialized():
                dist.destroy_process_group(self._background._group)
            if self._ranks.is_zero:
                self._drop_local_copies(None if self._newest is None else self._newest.path)
        failed = [*self._failed, *self._waiting]
        if not is_complete:
            for each in failed:
                notice(f"{each.target} was not uploaded. {_how_to_upload(each)}")
            return
        if failed and (self._raises or failed[-1] is self._newest):
            raise _not_uploaded(failed[-1])
        for each in failed:
            notice(str(_not_uploaded(each)))
        if self._error is not None and self._raises:
            raise self._error

    # In the thread -------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None]) -> None:
        self._queue.put(work)
        if self._thread is None:
            # A daemon, because an upload without a record is ignored if the process exits.
            self._thread = threading.Thread(target=self._work, name="roomier-uploads", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _process(self, upload: _Upload) -> None:
        """Send ``upload``, and then, from new to old, the uploads that failed before."""
        # An upload that is being sent has not failed: with "raise", the thread of training raises all of `_failed`.
        for each in [upload, *(failed for failed in reversed(self._failed) if failed is not upload)]:
            try:
                is_sent = self._send(each)
            except Exception as error:
                self._is_newest_sent = False
                each.error = error
                if each is upload:
                    self._failed = [*(failed for failed in self._failed if failed is not upload), upload]
                    notice(f"{each.target} was not uploaded: {error}")
                break
            finally:
                if each in self._waiting:
                    self._waiting.remove(each)
            if each is upload:
                self._is_newest_sent = is_sent
            self._remove_superseded()
            self._failed = [failed for failed in self._failed if failed is not each]
            shutil.rmtree(each.links, ignore_errors=True)
        while len(self._failed) > _MOST_FAILED:
            given_up = self._failed.pop(0)
            shutil.rmtree(given_up.links, ignore_errors=True)
            notice(f"gave up the upload of {given_up.path}, because newer checkpoints wait. The local copy is kept")

    def _send(self, upload: _Upload) -> bool:
        """Return True if ``upload`` is in the storage, or, on rank 0, False if it was cancelled."""
        ranks = self._background
        if not together(ranks, lambda: ranks.is_zero and self._begin(upload))[0]:
            return not upload.is_cancelled
        together(ranks, lambda: self._put(upload))
        together(ranks, lambda: self._commit(upload) if ranks.is_zero else None)
        return True

    def _begin(self, upload: _Upload) -> bool:
        """Claim the name of ``upload``. Return False if the ranks have nothing to send."""
        target, record = upload.target, upload.target / RECORD_NAME
        if upload.is_cancelled:
            return False
        self._done.know(target.parent)
        self._send_files()
        if not upload.record:
            put(self._files_of(upload)[0], target)
            self._note(upload)
            return False
        existing = read_bytes(record)
        if existing == upload.record:
            self._note(upload)
            return False
        if existing is not None and str(target) in self._done.own:
            delete(record)
        write_bytes(target / CLAIM_NAME, self._token)
        if read_bytes(record) is not None:
            raise _conflict(target)
        delete(target, kept=CLAIM_NAME)
        return True

    def _put(self, upload: _Upload) -> None:
        for file in self._files_of(upload):
            put(file, upload.target / file.name)

    def _commit(self, upload: _Upload) -> None:
        target, sizes = upload.target, sizes_in(upload.target)
        for file in json.loads(upload.record)["content"]["files"]:
            if sizes.get(file["name"]) != file["size_bytes"]:
                problem = (
                    f"is incomplete: {file['name']} has {sizes.get(file['name'], 0)} of {file['size_bytes']} bytes"
                )
                raise CheckpointError("checkpoint", str(target), problem, "Upload it again")

        def check_claim() -> None:
            if read_bytes(target / CLAIM_NAME) != self._token:
                raise _conflict(target)

        create(target / RECORD_NAME, upload.record, before=check_claim)
        self._note(upload)
        delete(target / CLAIM_NAME)

    def _note(self, upload: _Upload) -> None:
        self._done.own.add(str(upload.target))
        self._done.uploaded.add(upload.path)

    def _remove(self, target: RemotePath) -> None:
        self._superseded.append(target)
        self._remove_superseded()

    def _remove_superseded(self) -> None:
        """Remove the superseded checkpoints, unless the newest checkpoint is not in the storage, because its upload
        failed or was cancelled."""
        while self._superseded and self._is_newest_sent:
            target = self._superseded.pop(0)
            if str(target) in self._done.own:
                self._done.own.discard(str(target))
                try:
                    delete(target, first=RECORD_NAME)
                except RoomierError as error:
                    notice(f"a superseded checkpoint was not removed: {error}")

    def _send_files(self) -> None:
        """Send the files of the run folder that have changed, except for checkpoints and temporary files. An error is
        stored, because it must not prevent the upload of a checkpoint."""
        try:
            for path in _files_in(self._folder):
                target = remote_of(path)
                with suppress(FileNotFoundError):  # the run removed the file
                    state = (path.stat().st_mtime_ns, path.stat().st_size)
                    if target is not None and self._done.sent.get(path) != state:
                        put(path, target)
                        self._done.sent[path] = state
            self._error = None
        except CheckpointError as error:
            self._error = error

    def _finish(self) -> None:
        if self._failed:
            self._process(self._failed[-1])
        if self._ranks.is_zero:
            self._send_files()
            if self._error is not None:
                notice(f"not all files of the run folder were uploaded: {self._error}")

    # In the thread of training -------------------------------------------------------------------------------------

    def _linked(self, path: Path, target: RemotePath) -> _Upload:
        links = cache_folder() / "uploads" / f"{path.name}@{new_owner()}"
        for old in abandoned_in(links.parent):  # links of processes that were killed, which use disk space
            shutil.rmtree(old, ignore_errors=True)
        links.mkdir(parents=True)
        own, is_zero = _OF_RANK.format(self._ranks.world.rank + 1), self._ranks.is_zero
        is_file = not path.is_dir()
        for file in [path] if is_file else path.iterdir():
            of_any_rank = file.name.startswith("shard-") and not self._ranks.is_alone
            if file.name.startswith(own) or (is_zero and not of_any_rank):
                _link(file, links / file.name)
        if is_file:
            return _Upload(path, target, links, b"")
        return _Upload(path, target, links, read_regular(links / RECORD_NAME, MAX_RECORD_BYTES) if is_zero else b"")

    def _files_of(self, upload: _Upload) -> list[Path]:
        return sorted(file for file in upload.links.iterdir() if file.name != RECORD_NAME)

    def _raise_failure(self) -> None:
        if self._failed:
            raise _not_uploaded(self._failed[-1])

    def _wait_for_place(self) -> None:
        if self.num_waiting >= _MOST_WAITING and not self._has_waited:
            self._has_waited = True
            notice(f"training waits, because {_MOST_WAITING} checkpoints wait for their upload. Save less often")
        while self.num_waiting >= _MOST_WAITING:
            time.sleep(0.05)

    def _drop_local_copies(self, newest: Path | None) -> None:
        for path in self._done.uploaded.copy() - {newest}:
            with suppress(CheckpointError, OSError):
                remove(path) if path.is_dir() else path.unlink(missing_ok=True)
            self._done.uploaded.discard(path)


def upload(path: str | Path, target: str | None = None) -> None:
    """Copy the complete checkpoint ``path`` to remote storage. Its record is created last, so readers never see a part
    of the checkpoint.

    Args:
        path: a checkpoint folder, or a ``.ckpt`` file.
        target: address of the copy. None is possible only for a checkpoint in the cache of a remote run; it is then
            copied to the run's address.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, ``target`` is the checkpoint of another run, or the storage
            cannot be written.

    Example:
        >>> upload("runs/version_0/checkpoints/last", "s3://bucket/last")
    """
    source = absolute(path)
    found = remote_of(source) if target is None else path_of("target", target, CheckpointError)
    if not isinstance(found, RemotePath):
        raise CheckpointError("target", target, "is not an address", "Pass an address such as 's3://bucket/name'")
    if source.is_dir():
        read_record(source)
    uploads = Uploads(Ranks(), None, (), "raise")
    uploads.add(source, found)
    uploads.end(is_complete=True)


def check_storage(folders: Mapping[str, str | Path], ranks: Ranks) -> None:
    """Check that all ranks can write to the storage, and share the mirror. Every rank must call this function.

    Args:
        folders: folders by the argument that they were passed to. Folders that are not in a mirror are skipped.

    Raises:
        CheckpointError: a folder cannot be written, or the ranks do not share it.
    """
    token = ranks.from_zero(secrets.token_hex(8))
    for name, folder in folders.items():
        if (remote := remote_of(folder)) is not None:
            try:
                _check_one(remote, token, ranks)
            except RoomierError as error:  # also a StorageError, if the probe object cannot be read
                raise CheckpointError(name, str(remote), error.problem, error.action) from error


def _check_one(remote: RemotePath, token: str, ranks: Ranks) -> None:
    local, own = local_of(remote) / f".probe-{token}", remote / f".probe-{token}-{ranks.world.rank}"

    written: list[RemotePath] = []

    def write() -> None:
        _within(_PROBE_S, remote, lambda: create(own, token.encode(), waits_s=(1.0,)))
        written.append(own)
        if ranks.is_zero:
            local.parent.mkdir(parents=True, exist_ok=True)
            local.touch()

    def check_shared() -> None:
        if _within(_PROBE_S, remote, lambda: read_bytes(remote / f".probe-{token}-0")) is None:
            problem = "is not shared by the ranks, because each process has its own storage"
            raise CheckpointError("path", str(remote), problem, "Use one process, or another storage")
        if not local.exists():
            problem = f"requires a cache that all nodes share, but {local.parent} is different on another node"
            action = f"Set {ENVIRONMENT_VARIABLE} to a folder on shared storage"
            raise CheckpointError("path", str(remote), problem, action)

    try:
        together(ranks, write)
        together(ranks, check_shared)
    finally:
        with suppress(RoomierError):  # the permission to delete files is not needed if all checkpoints are kept
            for each in written:
                _within(_PROBE_S, remote, partial(delete, each))
        local.unlink(missing_ok=True) if ranks.is_zero else None


def _within(limit_s: float, remote: RemotePath, request: Callable[[], T]) -> T:
    """Return ``request()``. Raises CheckpointError if it takes longer than ``limit_s`` seconds."""
    answers = in_daemon(request, "roomier-probe")  # because the request cannot be stopped
    try:
        return answers.result(limit_s)
    except TimeoutError as error:
        if answers.done():  # an error of the client
            raise
        problem = f"cannot be written, because the storage has not answered for {limit_s:.0f} s"
        action = "Check the network and the address of the server"
        raise CheckpointError("path", str(remote), problem, action) from error


def _conflict(target: RemotePath) -> ConflictError:
    problem = "is the checkpoint of another run"
    return ConflictError("checkpoint", str(target), problem, "Use a different dirpath or filename for each run")


def _not_uploaded(upload: _Upload) -> CheckpointError:
    error = upload.error
    problem = f"was not uploaded ({getattr(error, 'problem', error)}). Its local copy is {upload.path}"
    return CheckpointError("checkpoint", str(upload.target), problem, _how_to_upload(upload))


def _how_to_upload(upload: _Upload) -> str:
    call = f"roomier.checkpoint.upload({str(upload.path)!r}, {str(upload.target)!r})"
    return f'To upload it again, run: python -c "import roomier; {call}"'


def _files_in(folder: Path | None) -> Iterator[Path]:
    for place, folders, names in os.walk(folder) if folder is not None else ():
        folders[:] = [
            each for each in folders if each[0] != "." and Path(place, each) != Path(str(folder), "checkpoints")
        ]
        yield from (path for name in names if name[0] != "." and (path := Path(place, name)).is_file())


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except OSError:  # the file system has no hard links
        shutil.copyfile(file, link)
