"""Ranks that a Trainer finds, ranks that it would start, and cases in which it cannot start ranks."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from roomier import Plan, PlanError, RoomierError, Trainer
from roomier.core.world import World
from roomier.launch.environment import RANK_VARIABLES
from roomier.launch.start import command_again
from tests.device_layer.accelerators import have_accelerator

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, "NODE_RANK"):
        monkeypatch.setenv(name, "")  # so that pytest removes the variables that a Trainer exports
        monkeypatch.delenv(name)


def torchrun(monkeypatch: pytest.MonkeyPatch, *, size: int, local_size: int) -> None:
    values = {"RANK": 1, "WORLD_SIZE": size, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": local_size, "GROUP_RANK": 0}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_auto_uses_the_ranks_of_the_launcher(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, size=4, local_size=2)
    trainer = make_trainer(strategy="zero2")
    assert (trainer.plan.parallel.devices, trainer.plan.parallel.num_nodes) == (2, 2)
    assert trainer.world == World(1, 4, local_rank=1, node_rank=0, local_size=2)
    assert (trainer.global_rank, trainer.world_size, trainer.is_global_zero) == (1, 4, False)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        (
            {"devices": 4, "strategy": "ddp"},
            "devices=4: does not match the 2 processes on each node that torchrun started.*nproc-per-node=4",
        ),
        (
            {"num_nodes": 3, "strategy": "ddp"},
            "num_nodes=3: does not match the 2 nodes that torchrun started.*--nnodes=3",
        ),
        (
            {"strategy": "single"},
            "strategy='single': supports one rank, but torchrun started 4 processes.*'ddp'.*start one process",
        ),
        ({"plan": Plan(), "accelerator": "auto"}, "devices=1: does not match the 2 processes on each node"),
        (
            {"plan": {"parallel": {"strategy": "ddp", "devices": 2}}, "accelerator": "auto"},
            "num_nodes=1: does not match the 2 nodes",
        ),
    ],
)
def test_numbers_of_ranks_that_do_not_match_the_launcher_are_rejected(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any], text: str
) -> None:
    torchrun(monkeypatch, size=4, local_size=2)
    with pytest.raises(PlanError, match=text):
        make_trainer(**keywords)


def test_the_default_strategy_of_several_ranks_is_ddp(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun(monkeypatch, size=4, local_size=2)
    parallel = make_trainer().plan.parallel
    assert (parallel.strategy, parallel.devices, parallel.num_nodes) == ("ddp", 2, 2)


def test_without_a_launcher_auto_is_one_process_on_a_cpu(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_trainer().world == World()
    assert capsys.readouterr().err == ""
    assert make_trainer(strategy="zero3").world == World()
    assert "devices=N starts N processes" in capsys.readouterr().err


def test_without_a_launcher_auto_uses_all_cuda_devices(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_accelerator(monkeypatch, "cuda", count=3)
    assert make_trainer(strategy="ddp", accelerator="auto").world == World(0, 3, local_size=3)
    assert make_trainer(strategy="ddp", accelerator="cpu").world == World()
    assert make_trainer(accelerator="auto").world == World()


def test_without_a_launcher_this_process_is_rank_0(make_trainer: MakeTrainer) -> None:
    assert make_trainer(strategy="ddp", devices=4).world == World(0, 4, local_size=4)
    assert "RANK" not in os.environ


def test_several_nodes_without_a_launcher(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    trainer = make_trainer(strategy="ddp", devices=2, num_nodes=3)
    assert trainer.world == World(2, 6, local_rank=0, node_rank=1, local_size=2)
    monkeypatch.setenv("NODE_RANK", "3")
    with pytest.raises(RoomierError, match="NODE_RANK=3: must be from 0 to 2"):
        make_trainer(strategy="ddp", devices=2, num_nodes=3)


def test_nodes_of_a_launcher(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTACK_NODE_RANK", "1")
    monkeypatch.setenv("DSTACK_NODES_NUM", "2")
    trainer = make_trainer(devices=2)
    assert trainer.plan.parallel.strategy == "ddp"
    assert trainer.world == World(2, 4, local_rank=0, node_rank=1, local_size=2)
    with pytest.raises(PlanError, match="num_nodes=3: does not match the 2 nodes that dstack started"):
        make_trainer(strategy="ddp", devices=2, num_nodes=3)


# Ranks that cannot be started -----------------------------------------------------------------------------------------


def as_in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    main = ModuleType("__main__")
    main.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", main)


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py", "--lr", "0.1"],
        ["python", "-X", "dev", "-m", "project.train"],
        ["/bin/python3", "/bin/roomier", "fit", "--trainer.devices", "2"],
    ],
)
def test_ranks_are_started_with_the_same_command(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    as_in_a_script(monkeypatch)
    monkeypatch.setattr(sys, "orig_argv", words)
    assert list(command_again().words) == [sys.executable, *words[1:]]


def test_a_custom_loop_in_a_notebook_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_script(monkeypatch)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(
        RoomierError, match=r"a notebook .* only a Trainer .* Use Trainer.fit, or move the run to a script"
    ):
        command_again()


@pytest.mark.parametrize("file", [None, "<stdin>", "/dev/stdin", "pipe"])
def test_code_without_a_file_cannot_start_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str | None
) -> None:
    as_in_a_script(monkeypatch)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # `python <(cat script.py)`
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = str(tmp_path / "pipe") if file == "pipe" else file
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(RoomierError, match=r"code from `python -c` or from standard input"):
        command_again()


@pytest.mark.parametrize(
    ("name", "maximum", "text"),
    [
        ("", "", r"devices=1000: roomier starts at most \d+ ranks .* has \d+ cores. .* ROOMIER_MAX_DEVICES"),
        ("ROOMIER_MAX_DEVICES", "999", "at most 999 ranks on this machine"),
        ("ROOMIER_MAX_DEVICES", "1000", "under pytest"),  # this check passes, and the next one fails
        ("ROOMIER_MAX_DEVICES", "many", "ROOMIER_MAX_DEVICES='many': must be an integer"),
    ],
)
def test_far_more_ranks_than_cores_are_rejected(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, name: str, maximum: str, text: str
) -> None:
    if name:
        monkeypatch.setenv(name, maximum)
    trainer = make_trainer(strategy="ddp", devices=1000, max_steps=1)
    with pytest.raises(RoomierError, match=text):
        trainer.fit(torch.nn.Linear(1, 1), [torch.ones(1, 1)])


def test_a_test_cannot_start_ranks(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(strategy="ddp", devices=2, max_steps=1)
    with pytest.raises(RoomierError, match="under pytest, further ranks would run the tests again"):
        trainer.fit(torch.nn.Linear(1, 1), [torch.ones(1, 1)])


def test_several_nodes_require_the_address_of_rank_0(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_in_a_script(monkeypatch)
    trainer = make_trainer(strategy="ddp", devices=2, num_nodes=2, max_steps=1)
    with pytest.raises(RoomierError, match=r"num_nodes=2: .* start ranks only on one machine. .*torchrun --nnodes=2"):
        trainer.fit(torch.nn.Linear(1, 1), [torch.ones(1, 1)])


def test_ranks_cannot_exchange_tensors_of_mps(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    have_accelerator(monkeypatch, "mps")
    trainer = make_trainer(strategy="ddp", devices=2, accelerator="auto", max_steps=1)
    with pytest.raises(RoomierError, match="accelerator='mps': does not support several ranks"):
        trainer.fit(torch.nn.Linear(1, 1), [torch.ones(1, 1)])
