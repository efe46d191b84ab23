"""Position of the training thread, as the heartbeat reads it, at each place in a real run."""

import bdb
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import roomier
from roomier.api.logger import Logger
from roomier.callbacks import ModelCheckpoint
from roomier.launch.records import Activity, Position
from roomier.train.position import TrainingThread

Look = Callable[[str], None]


class Data(Dataset[Tensor]):
    def __init__(self, look: Look) -> None:
        self.look = look

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        self.look(f"data {index}")
        return torch.ones(4)


class SpyLogger(Logger):
    def __init__(self, look: Look) -> None:
        self.look = look

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.look("logger")


class Model(roomier.Module):
    def __init__(self, look: Look) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.look = look
        self.compiled = torch.compile(lambda x: x + 1, backend=self.compile_backend)

    def compile_backend(self, graph: Any, _: Any) -> Any:
        self.look("compile")
        return graph

    def setup(self, stage: str) -> None:
        self.look("setup")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.look(f"step {batch_idx}")
        if batch_idx == 2:
            self.compiled(batch)
            bdb.Bdb().runcall(self.look, "debugger")
        return self.net(batch).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look(f"hook {batch_idx}")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look(f"validation {batch_idx}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.look("checkpoint")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.look("optimizers")
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Position]:
    """Return the position that another thread reads at the first visit of each place."""
    found: dict[str, Position] = {}
    thread: list[TrainingThread] = []

    def look(place: str) -> None:
        if thread and place not in found:
            looking = threading.Thread(target=lambda: found.setdefault(place, thread[0].position()))
            looking.start()
            looking.join()

    trainer = roomier.Trainer(
        max_epochs=2,
        accelerator="cpu",
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=SpyLogger(look),
        callbacks=[ModelCheckpoint()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path_factory.mktemp("runs"),
    )
    thread.append(TrainingThread(trainer))
    look("before")
    data = Data(look)
    trainer.fit(Model(look), DataLoader(data, batch_size=4), [torch.ones(2, 4)] * 2)
    look("after")
    found["stack"] = Position(Activity.LONG, thread[0].stack())
    return found


PLACES = {
    "before": (Activity.LONG, "setup"),
    "setup": (Activity.LONG, "setup"),
    "optimizers": (Activity.LONG, "setup"),
    "data 0": (Activity.LONG, "first step"),
    "step 0": (Activity.LONG, "first step"),
    "hook 0": (Activity.LONG, "on_train_batch_end"),
    "logger": (Activity.LONG, "logging"),
    "data 5": (Activity.STEP, "loading data"),
    "step 1": (Activity.STEP, "training step"),
    "compile": (Activity.LONG, "compiling"),
    "debugger": (Activity.DEBUGGED, "debugger"),
    "validation 0": (Activity.LONG, "validation"),
    "checkpoint": (Activity.LONG, "checkpoint"),
    "after": (Activity.LONG, "setup"),
}


@pytest.mark.parametrize("place", PLACES)
def test_each_place_of_a_run_has_its_activity(seen: dict[str, Position], place: str) -> None:
    assert (seen[place].activity, seen[place].phase) == PLACES[place]


def test_position_counts_steps_and_micro_batches(seen: dict[str, Position]) -> None:
    assert [(seen[f"step {index}"].step, seen[f"step {index}"].batch) for index in range(4)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert (seen["validation 1"].step, seen["validation 1"].batch) == (4, 1)


def test_stack_belongs_to_the_training_thread(seen: dict[str, Position]) -> None:
    assert "test_position.py" in seen["stack"].phase
    assert "in seen" in seen["stack"].phase


def test_debug_server_in_the_process_counts_as_a_debugger(
    make_trainer: Callable[..., roomier.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "debugpy", ModuleType("debugpy"))
    found: list[Position] = []

    class Looks(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            found.append(thread.position())
            return self.net(batch).mean()

    trainer = make_trainer(max_steps=2)
    thread = TrainingThread(trainer)
    trainer.fit(Looks(lambda _: None), [torch.ones(2, 4)] * 2)
    assert [each.activity for each in found] == [Activity.DEBUGGED] * 2


def test_reading_the_position_does_not_keep_variables_of_the_step(make_trainer: Callable[..., roomier.Trainer]) -> None:
    alive: list[bool] = []

    class Looks(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hidden = self.net(batch)
            self.hidden = weakref.ref(hidden)
            heartbeat = threading.Thread(target=thread.position)
            heartbeat.start()
            heartbeat.join()
            return hidden.mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            alive.append(self.hidden() is not None)

    trainer = make_trainer(max_steps=2)
    thread = TrainingThread(trainer)
    gc.disable()
    try:
        trainer.fit(Looks(lambda _: None), [torch.ones(2, 4)] * 2)
    finally:
        gc.enable()
    assert alive == [False, False]


def test_second_epoch_may_prepare_its_data_for_long(make_trainer: Callable[..., roomier.Trainer]) -> None:
    found: list[Position] = []

    class Looks(Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            found.append(thread.position())
            return torch.ones(4)

    trainer = make_trainer(max_epochs=2)
    thread = TrainingThread(trainer)
    trainer.fit(Model(lambda _: None), DataLoader(Looks(), batch_size=2))
    assert [each.activity for each in found[4:]] == [Activity.LONG] * 2 + [Activity.STEP] * 2
    assert {each.phase for each in found[4:]} == {"loading data"}
