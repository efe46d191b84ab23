"""Notices of preemption: a cloud announces that it will stop a machine, before it sends a signal or cuts the power.

The services and the formats of their answers are documented by their clouds: *Spot Instance interruption notices* and
*instance metadata version 2* (AWS), *Preemptible VM instances, detecting if an instance was preempted* (Google Cloud),
and *Scheduled Events for Linux VMs* (Azure).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.launch.ray_run import ray_run

SOURCE = "ROOMIER_PREEMPTION"
"""Name of an environment variable: the source of notices, ``"aws"``, ``"azure"``, ``"gcp"`` or ``"file:PATH"``."""

_PERIOD_S = 0.5
_TIMEOUT_S = 10.0
_ALL_WORKERS_S = 10.0  # time within which Ray sends a notice to all workers
_LINK_LOCAL = "http://169.254.169.254"


@dataclass(frozen=True)
class Preemption:
    """An announced stop of this machine.

    Attributes:
        source: text that names the source of the notice.
        stops_at: time of the stop; None if the source does not state it.
    """

    source: str
    stops_at: datetime | None = None


Poll = Callable[[], Preemption | None]
"""Function that asks a source for a notice. It raises an exception if the source does not answer."""


def source_of(environ: Mapping[str, str]) -> Poll | None:
    """Return a function that asks the source that ``environ`` selects. If it selects no source, ask Ray in a worker of
    Ray Train, and return None in other processes.

    Raises:
        RoomierError: the source is unknown.
    """
    chosen = environ.get(SOURCE)
    if not chosen:
        return None if ray_run() is None else _ray
    if chosen.startswith("file:") and (path := chosen.removeprefix("file:")):
        return lambda: Preemption(f"the file {path}") if Path(path).exists() else None
    poll = {"aws": _aws, "azure": _azure, "gcp": _gcp}.get(chosen)
    if poll is None:
        action = f"Set {SOURCE} to 'aws', 'azure', 'gcp' or 'file:PATH', or unset it"
        raise RoomierError(SOURCE, chosen, "is not a source of preemption notices", action)
    return lambda: poll(environ)


class PreemptionThread:
    """Thread that asks a source for a notice until it receives one, so that a slow answer never delays a step.

    Args:
        poll: function that asks the source.
        on_notice: function that is called in the thread after the first notice.
    """

    def __init__(self, poll: Poll, on_notice: Callable[[Preemption], None]) -> None:
        self._poll, self._on_notice = poll, on_notice
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="roomier-preemption", daemon=True).start()

    def close(self) -> None:
        """Stop asking. The thread ends after its current request, for which this method does not wait."""
        self._is_closed.set()

    def _run(self) -> None:
        is_reported = False
        while True:
            try:
                found = self._poll()
            except Exception as error:  # also a malformed answer
                found = None
                if not (is_reported or self._is_closed.is_set()):
                    is_reported = True
                    problem = "no preemption notice can be received at the moment, so a preemption may lose steps"
                    notice(f"{problem}: {error}. roomier repeats the request", every_rank=True)
            if self._is_closed.is_set():
                return
            if found is not None:
                self._on_notice(found)
                return
            self._is_closed.wait(_PERIOD_S)


def await_restart_by_ray() -> None:
    """In a worker of Ray Train that stops because of a notice, wait until Ray ends this process.

    Ray restarts a preempted run on other nodes at the time of the preemption. Until then, the return of all workers
    would complete the run, and an error would count as one of its ``max_failures``.
    """
    if ray_run() is None:
        return
    until = time.monotonic() + _ALL_WORKERS_S
    while _ray() is not None or time.monotonic() < until:
        time.sleep(_PERIOD_S)


def _ray() -> Preemption | None:
    # ray.train.get_preemption_info() returns the same value, but is a collective, which this thread must not call.
    from ray.train.v2._internal.execution.context import get_train_context

    info = get_train_context().preemption_context.preemption_info
    if info is None:
        return None
    deadline = datetime.fromtimestamp(info.deadline_ms / 1000, UTC) if info.deadline_ms else None
    return Preemption("Ray", deadline)


def _aws(environ: Mapping[str, str]) -> Preemption | None:
    base = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _LINK_LOCAL).rstrip("/")
    token = _answer(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    url = f"{base}/latest/meta-data/spot/instance-action"
    text = _answer(url, {"X-aws-ec2-metadata-token": token or ""})  # no such page without a notice
    if text is None:
        return None
    return Preemption("the metadata service of AWS", datetime.fromisoformat(json.loads(text)["time"]))


def _gcp(environ: Mapping[str, str]) -> Preemption | None:
    host = environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    text = _answer(f"http://{host}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return Preemption("the metadata service of Google Cloud") if text == "TRUE" else None


def _azure(environ: Mapping[str, str]) -> Preemption | None:
    base = environ.get("AZURE_POD_IDENTITY_AUTHORITY_HOST", _LINK_LOCAL).rstrip("/") + "/metadata"
    text = _answer(f"{base}/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    for event in json.loads(text or "{}").get("Events", ()):
        if event["EventType"] in ("Preempt", "Terminate"):
            # Every machine of a scale set receives the events of all its machines.
            name = _answer(f"{base}/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"})
            if name in event["Resources"]:
                stops_at = parsedate_to_datetime(event["NotBefore"]) if event.get("NotBefore") else datetime.now(UTC)
                return Preemption("the scheduled events of Azure", stops_at)
    return None


def _answer(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Return the answer of a metadata service, which is never asked through a proxy. Return None if there is no such
    page."""
    from urllib import error, request  # slow to import

    opener = request.build_opener(request.ProxyHandler({}))
    try:
        with opener.open(request.Request(url, headers=dict(headers), method=method), timeout=_TIMEOUT_S) as response:
            text: str = response.read().decode()
    except error.HTTPError as found:
        if found.code == 404:
            return None
        raise OSError(f"{url}: {found}") from found
    except OSError as found:
        raise OSError(f"{url}: {getattr(found, 'reason', found)}") from found
    return text.strip()
