"""Training steps on stages that run one after the other in one process, against the step on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from roomier.api.blocks import find_blocks
from roomier.core.errors import PlanError, TrainingError
from roomier.techniques.pipeline import trace as tracing
from roomier.techniques.pipeline.pipeline import find_pipeline
from tests.context.networks import tokens
from tests.pipeline.emulated import check_stages, run_stages, traced
from tests.pipeline.networks import GLUE, MODELS, Caching, Escaping, Glue, loss_of, swin


def features(num_batches: int = 3, num_rows: int = 5) -> list[torch.Tensor]:
    return [torch.randn(num_rows, 8, dtype=torch.float64) for _ in range(num_batches)]


def glue(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Glue(kind).double().train()


@pytest.mark.parametrize("kind", GLUE)
def test_code_between_blocks_reads_what_it_reads_on_one_device(kind: str) -> None:
    network = glue(kind)
    check_stages(network, loss_of, features(), 4)


@pytest.mark.parametrize(
    "name", ["gpt", "mixtral router", *(pytest.param(each, marks=pytest.mark.more) for each in list(MODELS)[2:])]
)
def test_models_train_on_stages_without_changes(name: str) -> None:
    torch.manual_seed(0)
    network = MODELS[name]().double().train()
    batches = [tokens(2, 11, seed) for seed in range(2)]
    for num_stages in (2, 4):
        check_stages(network, loss_of, batches, num_stages)


def test_stages_begin_within_blocks_that_consist_of_blocks() -> None:
    torch.manual_seed(0)
    network = swin().double().train()
    images = {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64), "labels": torch.tensor([0, 2])}
    trace = traced(network, loss_of, images)
    starts = find_pipeline(network, find_blocks(network), trace, 4, "gpipe").starts
    assert any("blocks.1" in name for name, _ in starts)
    check_stages(network, loss_of, [images], 4)


def test_a_network_without_blocks_is_divided_between_its_layers() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))
    check_stages(layers.double(), lambda network, batch: network(batch).pow(2).mean(), features(), 3)


def test_stages_begin_at_the_modules_of_a_split() -> None:
    network = glue("plain")
    trace = traced(network, loss_of, features(1)[0])

    def starts(*split: str) -> list[str]:
        found = find_pipeline(network, find_blocks(network), trace, 3, "gpipe", split).starts
        return [name for name, _ in found]

    assert starts("layers.1", "head") == ["layers.1", "head"]
    with pytest.raises(PlanError, match=r"split='layer.1': is not a module .* Use names from \['layers.0', .*'head'\]"):
        starts("layer.1", "head")
    with pytest.raises(PlanError, match=r"Use the order \['layers.1', 'layers.3'\]"):
        starts("layers.3", "layers.1")
    with pytest.raises(PlanError, match="must contain different modules"):
        starts("layers.1", "layers.1")


def test_a_boundary_carries_only_values_that_later_stages_read() -> None:
    x = features(1)[0]
    plain, skips, read = (traced(glue(kind), loss_of, x) for kind in ("plain", "skips", "item"))
    assert [len(plain.carried(each)) for each in range(1, 8)] == [1] * 7
    assert [len(skips.carried(each)) for each in range(1, 8)] == [1, 1, 2, 3, 4, 3, 2]
    assert [len(read.carried(each)) for each in range(1, 8)] == [1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(("kind", "name"), [("item", "consume"), ("numpy", "_reads")])
def test_without_the_reads_of_python_the_result_is_wrong(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = tracing._StepRecorder
    if name == "_reads":
        monkeypatch.setattr(recorder, name, lambda self: {})
    else:
        monkeypatch.setattr(tracing, "_DEPENDS_ON_VALUES", set())
    with pytest.raises(AssertionError):
        check_stages(glue(kind), loss_of, features(), 3)


def test_rejected_steps_name_the_module() -> None:
    with pytest.raises(PlanError, match="norm runs on several ranks, each of which would update other statistics"):
        run_stages(glue("statistics"), lambda network, batch: network(batch) + network(batch), features(1), 2)
    with pytest.raises(TrainingError, match=r"use_reentrant=True: calls layers.0 .* Pass use_reentrant=False"):
        traced(glue("reentrant"), loss_of, features(1)[0])
    with pytest.raises(
        TrainingError, match=r"reads a tensor that layers.0.0 stores.* Return the tensor from layers.0.0"
    ):
        traced(Escaping().double(), loss_of, torch.randn(3, 16, dtype=torch.float64))
    with pytest.raises(TrainingError, match="calls 0, which stores or converts tensors in its first call"):
        traced(nn.Sequential(*(nn.Sequential(Caching()) for _ in range(2))), loss_of, torch.randn(3, 16))
    network = glue("plain")
    batches = features()
    shorter = copy.deepcopy(network)

    def step(each: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(each, Glue)
        layers = [*each.layers][:: -1 if batch is batches[1] else 1]
        hidden = each.embedding(batch)
        for layer in layers:
            hidden = layer(hidden)
        loss: torch.Tensor = each.head(hidden).pow(2).mean()
        return loss

    with pytest.raises(TrainingError, match=r"training_step='layers.5': the first batch ran layers.0 at this place"):
        run_stages(shorter, step, batches, 3)
