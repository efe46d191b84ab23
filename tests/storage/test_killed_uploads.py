"""Runs that are killed with SIGKILL while they upload a checkpoint resume bit-equal, also on an empty machine."""

import os
import random
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest

from roomier import checkpoint
from roomier.checkpoint.record import RECORD_NAME
from roomier.storage import sending
from tests.ranks.pool import RankFailed, RankPool
from tests.storage.runs import check_storage, journal_of, train
from tests.storage.servers import Proxy, Request, gcs_environment, gcs_server, proxied

# Each rank is a fork of a process that has imported this file, so the clients are not imported again in each rank.
pytest.importorskip("gcsfs", reason="requires the extra services")
pytestmark = pytest.mark.services

ROOT = "gs://bucket/runs"
PHASES = {"first third": (0.0, 0.33), "second third": (0.33, 0.66), "last third": (0.66, 0.99)}
AFTER = ("before the record", "before the claim is deleted", "while the predecessor is deleted")
WIDTH = 60_000  # the optimizer states exceed 5 MB, so gcsfs sends them in parts
MAX_STEPS = 100


class Killer:
    """Kills a rank in one phase of an upload, after a number of bytes that is drawn from the phase.

    The upload is the second or third of the process, because the first one shows how many bytes an upload has.

    Attributes:
        phase: the phase.
        folder: name of the checkpoint that is uploaded.
        share: share of the bytes of its tensor files that the proxy had received at the kill; None before it.
    """

    def __init__(self, phase: str, pid_file: Path, draw: random.Random) -> None:
        self.phase = phase
        self.folder = self.removed = ""
        self.share: float | None = None
        self._at = draw.uniform(*PHASES.get(phase, (0.0, 0.0)))
        self._num_before = draw.randrange(1, 3)
        self._num_deletes = draw.randrange(2, 5)  # the first one deletes the record
        self._pid_file = pid_file
        self._num_bytes = self._total_bytes = 0
        self._lock = threading.Lock()

    def on_body(self, request: Request, piece: bytes) -> None:
        name = re.search(
            r"/checkpoints/([^/]+)/([\w.-]+)", unquote(request.path) + unquote(request.start.decode("latin-1"))
        )
        if request.method == "GET" or name is None or self.share is not None:
            return
        with self._lock:
            self._count(request, piece, *name.groups())

    def _count(self, request: Request, piece: bytes, folder: str, file: str) -> None:
        is_delete, is_complete, rank = request.method == "DELETE", not piece, 0
        is_now = self._num_before <= 0
        if file == sending.CLAIM_NAME and not is_delete and is_complete:
            self.folder, self._num_bytes = folder, 0
            self._num_before -= 1 if self._total_bytes else 0
            return
        if file == sending.CLAIM_NAME:
            is_here = is_delete and self.phase == "before the claim is deleted"
        elif is_delete:
            self._num_deletes -= is_now and folder != self.folder
            self.removed = folder
            is_here = self.phase == "while the predecessor is deleted" and self._num_deletes == 0
        elif file == RECORD_NAME:
            is_here = is_complete and self.phase == "before the record"
            self._total_bytes = self._num_bytes
        else:
            self._num_bytes += len(piece)
            is_here = self.phase in PHASES and self._num_bytes >= self._at * self._total_bytes
            rank = int(file.split("-")[1]) - 1 if file.startswith("shard-") else 0
        if is_now and is_here:
            self.share = self._num_bytes / self._total_bytes
            os.kill(int(self._pid_file.with_suffix(f".{rank}").read_text()), signal.SIGKILL)
            raise ConnectionAbortedError

    def check(self) -> None:
        """Check that the objects in the storage are those of the phase, and that a checkpoint without a record is not
        listed."""
        assert self.share is not None
        system, path = fsspec.url_to_fs(f"{ROOT}/version_0/checkpoints", use_listings_cache=False)
        found = {tuple(each.split("/")[-2:]) for each in system.find(path)}
        has_record, has_claim = ((self.folder, name) in found for name in (RECORD_NAME, sending.CLAIM_NAME))
        listed = [each.name for each in map(Path, checkpoint.list_complete(f"{ROOT}/version_0/checkpoints"))]
        if self.phase in PHASES or self.phase == "before the record":
            assert (has_claim, has_record, self.folder in listed) == (True, False, False)
            low, high = PHASES.get(self.phase, (1.0, 1.0))
            assert low <= self.share <= high + 0.05
        else:
            assert has_record
            assert listed[-1] == self.folder
            assert has_claim == (self.phase == "before the claim is deleted")
        if self.phase == "while the predecessor is deleted":
            assert self.removed in {folder for folder, _ in found}
            assert (self.removed, RECORD_NAME) not in found


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Proxy in front of a server whose objects are in a folder."""
    pytest.importorskip("gcp_storage_emulator", reason="requires the extra services")
    with gcs_server(tmp_path / "gcs", "bucket") as url, proxied(url.removeprefix("http://")) as found:
        for name, value in gcs_environment(found.url).items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("gs").clear_instance_cache()
        yield found
        fsspec.get_filesystem_class("gs").clear_instance_cache()


def train_in_parts(*arguments: Any, **keywords: Any) -> None:
    """Call ``train`` with uploads in parts of 1 MB."""
    warnings.filterwarnings("ignore", "Sending a large body", ResourceWarning)  # from gcsfs; Python ignores it
    sending._PART_BYTES = 2**20
    strategy = "single" if os.environ["WORLD_SIZE"] == "1" else "zero2"
    train(*arguments, width=WIDTH, strategy=strategy, **keywords)


@pytest.mark.parametrize(("num_ranks", "num_kills"), [(1, 6), (2, 3), pytest.param(1, 30, marks=pytest.mark.slow)])
def test_kills_during_uploads(
    num_ranks: int, num_kills: int, tmp_path: Path, on_ranks: RankPool, proxy: Proxy, new_machine: Callable[[], None]
) -> None:
    """Each kill falls in a known phase, two of three before the record. After it, no partial checkpoint is visible, and
    the next run continues with the same bits."""
    draw, step = random.Random(0), 0
    phases = [*PHASES, *AFTER]
    on_ranks(num_ranks, train_in_parts, tmp_path / "local", tmp_path / "expected", MAX_STEPS if num_kills > 6 else 40)
    for kill in range(num_kills):
        killer = Killer(phases[kill % len(phases)], tmp_path / "pid", draw)
        proxy.on_body = killer.on_body
        with pytest.raises(RankFailed, match="was killed by SIGKILL"):
            on_ranks(
                num_ranks,
                train_in_parts,
                ROOT,
                tmp_path / "journal",
                MAX_STEPS,
                pid_file=tmp_path / "pid",
                timeout_s=60.0,
            )
        proxy.clear()
        killer.check()
        print(f"kill {kill}: {killer.phase}, {killer.share:.0%} of the bytes of {killer.folder}")
        if kill % 2:
            new_machine()
        step = check_storage(ROOT, at_least=step)
    on_ranks(num_ranks, train_in_parts, ROOT, tmp_path / "journal", step + 2)
    assert check_storage(ROOT, at_least=step + 2) == step + 2
    for rank in range(num_ranks):
        found, expected = (journal_of(tmp_path / f"{name}.{rank}") for name in ("journal", "expected"))
        assert found == {number: expected[number] for number in range(1, max(found) + 1)}
