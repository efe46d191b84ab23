"""Fixtures for invalid inputs: a finished run with a valid checkpoint, which no input may damage.

The fixture ``nothing_is_lost`` wraps every test in this folder. After the test, the earlier checkpoint still loads
bit for bit, no partial folder exists, and the settings, threads and children of the process are unchanged.
"""

import gc
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roomier
from roomier import checkpoint
from roomier.core.errors import RoomierError


class Net(roomier.Module):
    """A network with four features and two classes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(4, width)
        self.head = nn.Linear(width, 2)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x).relu()), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_batches(num_batches: int = 4, batch_size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(batch_size, 4, generator=generator), torch.randint(0, 2, (batch_size,), generator=generator))
        for _ in range(num_batches)
    ]


@dataclass
class Desk:
    """Folders and data of one test.

    Attributes:
        root: ``default_root_dir``; ``version_0`` in it is a finished run of ``Net``.
        good: the checkpoint of ``version_0``, written at step 4.
        batches: four valid batches of ``Net``.
    """

    root: Path
    good: Path
    batches: list[Any] = field(default_factory=make_batches)

    Net = Net

    @staticmethod
    def net(**overrides: Any) -> Net:
        """Return a ``Net`` with replaced methods."""
        return type("Net", (Net,), overrides)()

    def trainer(self, **keywords: Any) -> roomier.Trainer:
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        return roomier.Trainer(**{"max_epochs": 2, "default_root_dir": self.root, **quiet, **keywords})

    def fit(
        self,
        model: Any = None,
        train: Any = None,
        val: Any = None,
        *,
        datamodule: Any = None,
        ckpt_path: Any = None,
        **keywords: Any,
    ) -> roomier.Trainer:
        """Create a Trainer with ``keywords``, and run a fit. The defaults are the arguments of the finished run."""
        trainer = self.trainer(**keywords)
        data = self.batches if train is None and datamodule is None else train
        trainer.fit(Net() if model is None else model, data, val, datamodule=datamodule, ckpt_path=ckpt_path)
        return trainer


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root folder with one finished run."""
    root = tmp_path_factory.mktemp("finished")
    torch.manual_seed(1)
    Desk(root, root).fit(max_epochs=1)
    return root


@pytest.fixture
def desk(finished_run: Path, tmp_path: Path) -> Desk:
    root = tmp_path / "runs"
    shutil.copytree(finished_run, root, symlinks=True)
    return Desk(root, root / "version_0" / "checkpoints" / "epoch=0-step=4")


@pytest.fixture(autouse=True)
def nothing_is_lost(desk: Desk) -> Iterator[None]:
    """Fail the test if its invalid input damaged data or changed the process."""
    files = _bytes_in(desk.good.parent)
    state = checkpoint.load(desk.good)
    before, running = _process_settings(), _running()
    yield
    assert _process_settings() == before
    if _started_since(running):
        gc.collect()  # the caught error referenced the workers of its loader
    deadline_s = time.monotonic() + 30
    while _started_since(running) and time.monotonic() < deadline_s:
        time.sleep(0.01)  # threads that serve a worker end after the worker
    assert not _started_since(running)
    now = _bytes_in(desk.good.parent)
    touched = {name for name in files if files[name] != now.get(name)}
    if touched:  # a test that damages the checkpoint leaves a marker file
        assert (desk.root / "damaged-on-purpose").exists(), touched
    else:
        assert _fingerprint(checkpoint.load(desk.good)) == _fingerprint(state)
        assert checkpoint.find_last(desk.root) is not None
    leftovers = [path for path in desk.root.parent.rglob("*") if path.name.startswith(".")]
    assert not leftovers
    for record in desk.root.glob("version_[1-9]*/checkpoints/*/run.json"):
        checkpoint.verify(record.parent)


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _fingerprint(state: Any) -> Any:
    """Return ``state`` in a form that compares bit for bit: tensors as dtype, shape and bytes."""
    if isinstance(state, Tensor):
        return str(state.dtype), tuple(state.shape), state.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):
        return {key: _fingerprint(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_fingerprint(value) for value in state]
    return state


def _running() -> set[str]:
    """Return the running threads and child processes."""
    threads = {f"thread {each.name} ({each.ident})" for each in threading.enumerate()}
    children = [each for each in psutil.Process().children() if "resource_tracker" not in _command(each)]
    return threads | {f"process {each.pid} {_command(each)}" for each in children}


def _started_since(running: set[str]) -> set[str]:
    """Return the threads and children that started after ``before``. Threads and children of earlier tests may end
    meanwhile."""
    return _running() - running


def _process_settings() -> dict[str, Any]:
    return {
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "warnings": list(warnings.filters),
    }


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


Act = Callable[[Desk], object]


@pytest.fixture
def refuses(desk: Desk) -> Callable[..., RoomierError]:
    """Call ``refuses(act, kind, field, received, action)`` to check an error of ``kind`` that ``act`` raises. The text
    of the error must begin with ``field=``, contain ``received``, and state ``action``, the next action of the user."""

    def check(act: Act, kind: type[RoomierError], field: str, received: str, action: str) -> RoomierError:
        with pytest.raises(RoomierError) as caught:
            act(desk)
        error = caught.value
        assert type(error).__mro__.count(kind), f"{type(error).__name__}: {error}"
        assert error.field == field, error
        assert str(error).startswith(f"{field}="), error
        assert received in str(error), error
        assert action in str(error), error
        assert action not in error.problem, f"{error}: the problem is stated, but not the next action"
        return error

    return check
