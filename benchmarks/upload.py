"""``python -m benchmarks upload``: step time while a checkpoint is uploaded to S3, compared with a step during a local
background save.

One run saves checkpoints in the background. After each save, its thread uploads the checkpoint, and after the upload
the run trains without either, so the three kinds of steps alternate. The server is moto's in another process. It
receives a limited number of bytes per second, because a server without a limit would use the cores of the training.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import RenderableType

from benchmarks.machine import circumstances
from benchmarks.options import at_least, table_of
from benchmarks.timing import muted, one_thread
from roomier import Callback, Module, Trainer
from roomier.callbacks import ModelCheckpoint

_LAYERS, _BATCH = 8, 8
_PIECE_BYTES = 2**18
_KINDS = {"idle": "neither", "save": "local background save", "upload": "upload"}


class _Net(Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(_LAYERS)])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        error: torch.Tensor = self.layers(batch) - batch  # of random numbers, so no gradient becomes denormal
        return error.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Timing(Callback):
    """Record the time of each step during which the kind of background work did not change."""

    def __init__(self) -> None:
        self.times_s: dict[str, list[float]] = {kind: [] for kind in _KINDS}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._kind, self._begin_s = self._kind_of(trainer), time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step_s = time.perf_counter() - self._begin_s
        if self._kind == self._kind_of(trainer):
            self.times_s[self._kind].append(step_s)

    def _kind_of(self, trainer: Any) -> str:
        if any(each.name == "roomier-checkpoint" for each in threading.enumerate()):
            return "save"
        return "upload" if trainer.run.uploads.num_waiting else "idle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--width", type=at_least(1), default=1024, help="width of the eight layers (%(default)s)")
    parser.add_argument("--saves", type=at_least(1), default=8, help="number of checkpoints (%(default)s)")
    parser.add_argument("--interval", type=at_least(1), default=220, help="steps between them (%(default)s)")
    parser.add_argument("--rate", type=at_least(1), default=25, help="MB per second of the server (%(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark. Values whose names end with ``_ms`` are medians in milliseconds."""
    facts, timing = circumstances(), _Timing()
    saving = ModelCheckpoint(every_n_train_steps=options.interval, save_top_k=1, async_save=True)
    num_steps = options.saves * options.interval
    samples: Any = torch.randn(_BATCH * num_steps, options.width)
    with _storage(options.rate * 1e6) as root, one_thread(), muted():
        trainer = Trainer(
            max_steps=num_steps,
            default_root_dir=root,
            callbacks=[saving, timing],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(_Net(options.width), torch.utils.data.DataLoader(samples, batch_size=_BATCH))
    steps_ms = {kind: round(1e3 * median(times_s), 3) for kind, times_s in timing.times_s.items()}
    return {
        "case": "upload",
        "settings": {name: getattr(options, name) for name in ("width", "saves", "interval", "rate")},
        **{f"{kind}_ms": step_ms for kind, step_ms in steps_ms.items()},
        "num_steps": {kind: len(times_s) for kind, times_s in timing.times_s.items()},
        "upload_over_save": round(steps_ms["upload"] / steps_ms["save"], 3),
        "upload_over_idle": round(steps_ms["upload"] / steps_ms["idle"], 3),
        **facts,
    }


@contextmanager
def _storage(bytes_per_s: float) -> Iterator[str]:
    """Run a server, and return the address of a folder in it."""
    import fsspec  # type: ignore[import-untyped]  # late import: an optional package

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, bytes_per_s), daemon=True)
    process.start()
    with tempfile.TemporaryDirectory() as cache:
        variables = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{here.recv()}",
            "ROOMIER_CACHE": cache,
            "no_proxy": "127.0.0.1",
        }
        with patch.dict(os.environ, variables):
            try:
                fsspec.filesystem("s3", use_listings_cache=False).mkdir("bucket")
                yield "s3://bucket/runs"
            finally:
                process.kill()
                process.join()


def _serve(connection: Connection, bytes_per_s: float) -> None:
    from moto.server import ThreadedMotoServer  # late import: an optional package

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    door = socket.create_server(("127.0.0.1", 0))
    connection.send(door.getsockname()[1])
    limit = _Limit(bytes_per_s)
    while True:
        client, _ = door.accept()
        upstream = socket.create_connection(server.get_host_and_port())
        threading.Thread(target=_forward, args=(client, upstream, limit), daemon=True).start()
        threading.Thread(target=_forward, args=(upstream, client, None), daemon=True).start()


class _Limit:
    """Limit of the bytes per second that all connections receive together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            end_s = self._free_s
        time.sleep(max(0.0, end_s - time.monotonic()))


def _forward(source: socket.socket, target: socket.socket, limit: _Limit | None) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            if limit is not None:
                limit.wait(len(data))
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each kind of step."""
    caption = (
        f"medians of one run that uploads at {result['settings']['rate']} MB/s; during an upload, a step takes "
        f"{result['upload_over_save']:.2f} times as long as during a local background save"
    )
    found = table_of(result, "a step during an upload", caption, ("work in the background",), ("steps", "step"))
    for kind, name in _KINDS.items():
        found.add_row(name, str(result["num_steps"][kind]), f"{result[f'{kind}_ms']:.1f} ms")
    return found
