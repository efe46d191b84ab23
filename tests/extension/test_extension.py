"""An installed package adds an optimizer, a logger, an activation policy and a compression of gradients by an entry
point.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import roomier
from benchmarks.planner import Case, run
from roomier import PlanError
from roomier.core.extensions import load_extensions
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.loggers.by_name import LOGGERS
from roomier.plan import choices, plan_from_flags
from roomier.plan.choices import COMPRESSIONS, OPTIMIZERS, POLICIES
from roomier.plan.rules import RULES
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.memory.kinds import Kind
from roomier.planner.workload import Workload
from tests.parallel.parity import whole_weights
from tests.ranks.pool import RankPool

OPTIMIZER = {"name": "signum", "lr": 0.01}
WIDTH = 64


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch) - batch.roll(1, 1)).square().mean()
        self.log("loss", loss)
        return loss


def installed(folder: Path) -> list[str]:
    """Return folders for ``sys.path`` in which the package is installed."""
    information = folder / "roomier_example-1.0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: roomier-example\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[roomier.extensions]\nexample = roomier_example:extend\n")
    return [str(folder), str(Path(__file__).parent)]


def forecast(**flags: Any) -> Any:
    rates = dict.fromkeys(("fp64", "fp32", "tf32", "bf16", "fp16"), 1e12)
    link = Link(1e9)
    device = Device("any", "cpu", 80 * 2**30, rates, 1e12)
    machine = Machine(device, 2, 1, link, link, link, link, link, 2**40, "assumed")
    workload = Workload.of(Net(), torch.zeros(2, WIDTH))
    return Estimator(workload, machine).estimate(plan_from_flags(accelerator="cpu", **flags), 2)


def train(num_ranks: int, folders: list[str], options: dict[str, Any]) -> tuple[dict[str, Tensor], int, str]:
    sys.path[:0] = folders
    module = Net()
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = roomier.Trainer(
        max_epochs=1,
        devices=num_ranks,
        accelerator="cpu",
        precision="64-true",
        optimizer=OPTIMIZER,
        logger="rows",
        log_every_n_steps=1,
        enable_checkpointing=False,
        default_root_dir=folders[0],
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4 // num_ranks))  # type: ignore[arg-type]
    rows = sys.modules["roomier_example"].ROWS
    return whole_weights(module), len(rows), str(trainer.plan)


def test_extension_trains_on_shards(on_ranks: RankPool, tmp_path: Path) -> None:
    folders = installed(tmp_path)
    [(expected, num_rows, text)] = on_ranks(1, train, 1, folders, {})
    assert num_rows >= 4
    assert "Signum (Bernstein et al. 2018)" in text
    options: list[dict[str, Any]] = [
        {"strategy": "zero2"},
        {"strategy": "zero2", "step_in_backward": True},
        {"strategy": "zero3", "offload": {"optimizer_states": "disk", "parameters": "disk"}},
    ]
    for by_rank in on_ranks.each(2, train, [(2, folders, each) for each in options]):
        torch.testing.assert_close(by_rank[0][0], expected, rtol=0, atol=1e-9)  # in float64, no sign changes


@pytest.fixture
def without_entries() -> Iterator[None]:
    """Remove the entries of the extension after the test."""
    yield
    OPTIMIZERS.pop("signum", None)
    POLICIES.pop("int8_activations", None)
    COMPRESSIONS.pop("fp16", None)
    RULES[:] = [rule for rule in RULES if rule.__module__ != "roomier_example"]
    LOGGERS.pop("rows", None)
    load_extensions.cache_clear()


@pytest.mark.usefixtures("without_entries")
def test_planner_knows_the_optimizer_of_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="signum"):
        plan_from_flags(optimizer="signum")
    load_extensions.cache_clear()
    for folder in installed(tmp_path):
        monkeypatch.syspath_prepend(folder)
    signum, adamw = forecast(optimizer=OPTIMIZER), forecast(optimizer="adamw")
    num_bytes = 4 * sum(each.numel() for each in Net().parameters())
    states = [each.bytes_by_kind[Kind.OPTIMIZER_STATE] for each in (signum, adamw)]
    assert states[0] == num_bytes  # one moment
    assert states[1] == pytest.approx(2 * num_bytes, rel=0.01)
    sharded = forecast(optimizer=OPTIMIZER, strategy="zero2", devices=2)
    assert sharded.bytes_by_kind[Kind.OPTIMIZER_STATE] == pytest.approx(num_bytes / 2, rel=0.01)


def peaks(folders: list[str]) -> list[dict[str, Any]]:
    """Return forecast and measurement of a step under zero2, with and without the activation policy."""
    sys.path[:0] = folders
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = [Case("gpt_tied", "zero2", 2, each, "32-true", "adamw") for each in ("none", "int8_activations")]
    return run(cases, Ranks(World(rank, size, rank, 0, size)))


@pytest.mark.more
def test_planner_forecasts_the_memory_technique_of_an_extension(on_ranks: RankPool, tmp_path: Path) -> None:
    plain, packed = on_ranks(2, peaks, installed(tmp_path), timeout_s=120)[0]
    assert plain["error"] == pytest.approx(0, abs=0.001)
    assert packed["error"] == pytest.approx(0, abs=0.001)
    assert packed["measured_bytes"] < 0.95 * plain["measured_bytes"]


def train_fp32(num_ranks: int, folders: list[str], options: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    sys.path[:0] = folders
    torch.manual_seed(0)
    module, data = Net(), torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer = roomier.Trainer(
        max_epochs=1, devices=num_ranks, accelerator="cpu", logger=False, enable_checkpointing=False, **options
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4 // num_ranks))  # type: ignore[arg-type]
    return whole_weights(module), str(trainer.plan)


def test_approximations_of_an_extension_train_as_without_them(on_ranks: RankPool, tmp_path: Path) -> None:
    folders = installed(tmp_path)
    sgd = {"optimizer": {"name": "sgd", "lr": 0.1}}
    [(expected, _)] = on_ranks(1, train_fp32, 1, folders, sgd)
    options: list[dict[str, Any]] = [
        {"strategy": {"name": "ddp", "gradient_compression": "fp16"}},
        {"strategy": "zero2", "activation_checkpointing": "int8_activations"},
        {"strategy": "zero3", "activation_checkpointing": "int8_activations"},
    ]
    for by_rank in on_ranks.each(2, train_fp32, [(2, folders, {**sgd, **each}) for each in options]):
        weights, text = by_rank[0]
        assert "float16" in text or "8 bits" in text
        differences = [(weights[name] - weight).abs().max() for name, weight in expected.items()]
        assert 1e-7 < max(differences) < 1e-3  # a rounding error that plain training does not have


@pytest.mark.usefixtures("without_entries")
def test_rules_of_an_extension_and_of_its_policy_are_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_extensions.cache_clear()
    for folder in installed(tmp_path):
        monkeypatch.syspath_prepend(folder)
    for flags, action in (
        ({"precision": "64-true"}, "Use precision='32-true'"),
        ({"compile": True}, "compile=False"),
        ({"offload": {"activations": "disk"}}, "remove offload.activations"),
    ):
        with pytest.raises(PlanError, match=action):
            plan_from_flags(activation_checkpointing="int8_activations", **flags)  # type: ignore[arg-type]


def test_extension_can_provide_a_name_that_roomier_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "load_extensions", lambda: OPTIMIZERS.setdefault("lamb", OPTIMIZERS["adamw"]))
    try:
        assert plan_from_flags(optimizer="lamb").optimizer.name == "lamb"
    finally:
        OPTIMIZERS.pop("lamb", None)


@pytest.mark.usefixtures("without_entries")
def test_extension_that_fails_is_reported_and_does_not_replace_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = installed(tmp_path)
    entries = tmp_path / "roomier_example-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[roomier.extensions]\nbad = no_such\n")
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    load_extensions.cache_clear()
    with pytest.raises(PlanError, match="adamww"):
        plan_from_flags(optimizer="adamww")
    assert "the extension 'bad' (no_such) failed: ModuleNotFoundError" in capsys.readouterr().err
