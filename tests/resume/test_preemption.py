"""A notice of preemption, from a cloud's metadata service or a file, stops a run like SIGTERM, within the same time."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from roomier import Callback, Trainer
from roomier.core.errors import RoomierError
from roomier.launch.preemption import SOURCE, Preemption, PreemptionThread, source_of

Make = Callable[..., Any]
STOPS_AT = {"aws": "2026-05-04T08:22:00Z", "azure": "Mon, 04 May 2026 08:22:00 GMT"}


class MetadataService(BaseHTTPRequestHandler):
    """The parts of the metadata services of three clouds that announce a preemption."""

    is_preempted = False

    def do_PUT(self) -> None:
        is_token = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self.answer("the token" if is_token else None)

    def do_GET(self) -> None:
        headers, is_preempted = self.headers, self.is_preempted
        events = [
            {"EventType": "Preempt", "Resources": ["machine_2"], "NotBefore": STOPS_AT["azure"]},
            {"EventType": "Reboot", "Resources": ["machine_1"], "NotBefore": STOPS_AT["azure"]},
            {"EventType": "Preempt", "Resources": ["machine_1"], "NotBefore": STOPS_AT["azure"]},
        ]
        aws = json.dumps({"action": "terminate", "time": STOPS_AT["aws"]}) if is_preempted else None
        pages: dict[str, tuple[str, str, str | None]] = {
            "/latest/meta-data/spot/instance-action": ("X-aws-ec2-metadata-token", "the token", aws),
            "/computeMetadata/v1/instance/preempted": ("Metadata-Flavor", "Google", str(is_preempted).upper()),
            "/metadata/instance/compute/name": ("Metadata", "true", "machine_1"),
            "/metadata/scheduledevents": ("Metadata", "true", json.dumps({"Events": events[: 2 + is_preempted]})),
        }
        name, value, text = pages[self.path.partition("?")[0]]
        self.answer(text if headers[name] == value else None)

    def answer(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def announce(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Select the source of the parameter, and return a function that sends its notice: a signal or a preemption."""
    source: str = request.param
    if source in ("SIGTERM", "SIGUSR1"):
        monkeypatch.setenv("SLURM_JOB_ID", "7")  # SIGUSR1 ends only the jobs of SLURM
        yield lambda: signal.raise_signal(signal.Signals[source])
        return
    if source == "file":
        monkeypatch.setenv(SOURCE, f"file:{tmp_path / 'stop'}")
        yield (tmp_path / "stop").touch
        return

    class Service(MetadataService):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv(SOURCE, source)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy must not be asked
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{address}/")
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://{address}")
        yield lambda: setattr(Service, "is_preempted", True)
        server.shutdown()


class Announcer(Callback):
    """Callback that announces a preemption in the hook ``where`` of step 4, and delays later calls of this hook."""

    def __init__(self, where: str, announce: Callable[[], None]) -> None:
        self.announce, self.announced_s = announce, 0.0
        setattr(self, where, self.delay)

    def delay(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step >= 4:
            if not self.announced_s:
                self.announced_s = time.monotonic()
                self.announce()
            time.sleep(0.05)


@pytest.mark.parametrize("where", ["on_train_batch_end", "on_validation_batch_end"])
@pytest.mark.parametrize("announce", ["SIGTERM", "SIGUSR1", "file", "aws", "azure", "gcp"], indirect=True)
def test_a_notice_ends_the_run_with_a_checkpoint(
    announce: Any, where: str, runs: Any, net: Any, shuffled: Make, val_batches: Make, capfd: Any
) -> None:
    announcer = Announcer(where, announce)
    batches = list(val_batches()) * 40
    with pytest.raises(SystemExit) as left:
        runs.fit("run", net, shuffled, lambda: batches, max_steps=10**6, val_check_interval=4, callbacks=[announcer])
    assert time.monotonic() - announcer.announced_s < 1.0 + 0.5  # a step takes 0.1 s, a checkpoint less
    told = capfd.readouterr().err
    assert "saved at" in told
    assert runs.last_state("run")["progress"]["global_step"] >= 4
    source = os.environ.get(SOURCE)
    assert ("this machine stops" in told) == (source is not None)
    assert ("at 08:22:00 UTC" in told) == (source in STOPS_AT)
    assert left.value.code == (128 + signal.SIGUSR1 if "SIGUSR1" in told else 143)


def test_an_unreachable_service_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roomier.launch.preemption._PERIOD_S", 0.001)
    poll = source_of({SOURCE: "gcp", "GCE_METADATA_HOST": "127.0.0.1:9"})
    assert poll is not None
    calls: list[None] = []
    found: list[Preemption] = []

    def counted() -> Preemption | None:
        calls.append(None)
        return poll() if len(calls) < 5 else Preemption("the service")

    thread = PreemptionThread(counted, found.append)
    while not found:
        time.sleep(0.001)
    thread.close()
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "http://127.0.0.1:9/computeMetadata/v1/instance/preempted: [Errno 111] Connection refused" in told


def test_an_unknown_source_is_rejected() -> None:
    with pytest.raises(RoomierError, match="ROOMIER_PREEMPTION='azur': is not a source"):
        source_of({SOURCE: "azur"})
    assert source_of({}) is None
