"""A model that is materialized in shards has bit for bit the same weights as in a single process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roomier import Module, RoomierError, Trainer
from roomier.core.ranks import Ranks
from roomier.engine.materialise import built_in_parts
from tests.engine.materialised import (
    CustomStart,
    Layers,
    Make,
    built,
    differences,
    make_gpt,
    make_tied_gpt,
    plan_for,
    ranks_here,
    whole_tensors,
)
from tests.hugging_face.small import small
from tests.ranks.pool import RankPool

LAYOUTS = [
    (2, ["zero3"]),
    pytest.param(2, ["zero1", "ddp"], marks=pytest.mark.more),
    pytest.param(3, ["zero2"], marks=pytest.mark.more),
    pytest.param(4, ["hsdp"], marks=pytest.mark.more),
    pytest.param(4, ["zero3"], marks=pytest.mark.slow),
]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def as_one_process(make: Make) -> tuple[nn.Module, Tensor]:
    """Return the model, and the random numbers that are drawn next."""
    seed(7)
    return make(), torch.rand(3)


def built_in_configure_model(strategy: str, num_ranks: int) -> dict[str, list[str]]:
    ranks, plan = ranks_here(), plan_for(strategy, num_ranks)
    wrong: dict[str, list[str]] = {}
    for make in (make_gpt, make_tied_gpt, CustomStart):
        expected, next_draw = as_one_process(make)
        seed(7 + ranks.world.rank)  # the seed of rank 0 is used
        own_draw = torch.rand(3, generator=torch.Generator().manual_seed(7 + ranks.world.rank))
        with built_in_parts(plan, ranks):
            network = make()
        drawn = torch.rand(3)
        wrong[make.__name__] = differences(built(network, plan, ranks), expected)
        if not torch.equal(drawn, next_draw if ranks.is_zero else own_draw):
            wrong[make.__name__].append("what is drawn next")
        flags = {name: each.requires_grad for name, each in network.named_parameters()}
        if flags != {name: each.requires_grad for name, each in expected.named_parameters()}:
            wrong[make.__name__].append("what is trained")
    return wrong


def built_on_meta(strategy: str, num_ranks: int) -> dict[str, list[str]]:
    ranks, plan = ranks_here(), plan_for(strategy, num_ranks)
    wrong: dict[str, list[str]] = {}
    for make in (make_gpt, make_tied_gpt, Layers):
        expected, next_draw = as_one_process(make)
        with torch.device("meta"):
            network = make()
        seed(7 + ranks.world.rank)
        wrong[make.__name__] = differences(built(network, plan, ranks), expected)
        if ranks.is_zero and not torch.equal(torch.rand(3), next_draw):
            wrong[make.__name__].append("what is drawn next")
    return wrong


def built_both_ways(strategy: str, num_ranks: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    return built_in_configure_model(strategy, num_ranks), built_on_meta(strategy, num_ranks)


@pytest.mark.parametrize(("num_ranks", "strategies"), LAYOUTS)
def test_a_model_gets_the_weights_of_one_process(on_ranks: RankPool, num_ranks: int, strategies: list[str]) -> None:
    results = on_ranks.each(num_ranks, built_both_ways, [(strategy, num_ranks) for strategy in strategies])
    for strategy, by_rank in zip(strategies, results, strict=True):
        for in_configure_model, on_meta in by_rank:
            assert in_configure_model == {"make_gpt": [], "make_tied_gpt": [], "CustomStart": []}, strategy
            assert on_meta == {"make_gpt": [], "make_tied_gpt": [], "Layers": []}, strategy


@pytest.mark.parametrize("make", [make_gpt, make_tied_gpt, Layers])
def test_a_model_on_meta_is_materialized_in_one_process(make: Make) -> None:
    expected, _ = as_one_process(make)
    with torch.device("meta"):
        network = make()
    seed(7)
    assert differences(built(network, plan_for("single", 1), Ranks()), expected) == []


def built_in_bf16() -> list[str]:
    ranks, plan = ranks_here(), plan_for("zero3", 2, "bf16-true")
    expected, _ = as_one_process(make_gpt)
    seed(7)
    with torch.device("meta"):
        network = make_gpt()
    return differences(built(network, plan, ranks), expected.bfloat16())


@pytest.mark.more
def test_weights_are_sampled_before_they_are_rounded(on_ranks: RankPool) -> None:
    assert on_ranks(2, built_in_bf16) == [[], []]


def hugging_face(name: str) -> nn.Module:
    class_name = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}[name]
    sizes = {"vocab_size": 37, "hidden_size": 12, "intermediate_size": 20, "max_position_embeddings": 8}
    return small(class_name, dropout=0.1, **sizes)


def hugging_face_models() -> dict[str, Any]:
    ranks, plan = ranks_here(), plan_for("zero3", 2)
    found: dict[str, Any] = {}
    for name in ("gpt2", "llama", "bert"):
        expected, _ = as_one_process(lambda name=name: hugging_face(name))
        seed(7)
        with built_in_parts(plan, ranks):
            in_parts = hugging_face(name)
        found[f"{name} in configure_model"] = differences(built(in_parts, plan, ranks), expected)
        with torch.device("meta"):
            on_meta = hugging_face(name)
        seed(7)
        built(on_meta, plan, ranks)
        buffers = dict(expected.named_buffers())
        found[f"{name}'s buffers"] = [
            key for key, each in on_meta.named_buffers() if not torch.equal(each, buffers.pop(key))
        ] + list(buffers)
        found[name] = whole_tensors(on_meta)
        found[f"{name} as it is built"] = whole_tensors(expected)
    return found


@pytest.mark.more
def test_models_of_hugging_face_initialize_their_weights(on_ranks: RankPool) -> None:
    first, second = on_ranks(2, hugging_face_models)
    for name in ("gpt2", "llama", "bert"):
        for found in (first, second):
            assert found[f"{name} in configure_model"] == []
            assert found[f"{name}'s buffers"] == []
        ours, theirs = first[name], first[f"{name} as it is built"]
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.equal(tensor, second[name][key])
            # GPT-2's Conv1D samples in its constructor, so the values may differ, but not their distribution.
            assert float(tensor.float().std()) == pytest.approx(float(theirs[key].float().std()), rel=0.3)
            assert float(tensor.float().mean()) == pytest.approx(float(theirs[key].float().mean()), abs=0.01)


class Scale(nn.Module):
    """The constructor sets the weight to ones, but no reset_parameters() does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Steps(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("numbers", torch.arange(3, dtype=dtype), persistent=False)


@pytest.mark.parametrize(
    ("make", "name", "owner"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), Scale()), "1.weight", "Scale"),
        (lambda: Steps(torch.int64), "numbers", "Steps"),
        (lambda: Steps(torch.float32), "numbers", "Steps"),
    ],
)
def test_a_tensor_without_values_is_rejected(make: Make, name: str, owner: str) -> None:
    with torch.device("meta"):
        network = make()
    with pytest.raises(RoomierError, match=rf"model='{name}'.*Define reset_parameters\(\) in {owner}"):
        built(network, plan_for("single", 1), Ranks())


class HalfWritten(nn.Module):
    """Module that initializes its first rows only, so the ranks with these rows detect no error."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].fill_(1.0)


def error_of_half_written() -> str:
    with torch.device("meta"):
        network = HalfWritten()
    try:
        built(network, plan_for("zero3", 2), ranks_here())
    except RoomierError as error:
        return str(error)
    return "no error"


@pytest.mark.more
def test_a_tensor_without_values_on_one_rank_is_rejected_on_all(on_ranks: RankPool) -> None:
    first, second = on_ranks(2, error_of_half_written)
    assert first == second
    assert "model='weight': was built on the meta device" in first


def test_lost_initialization_of_a_constructor_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        networks = [nn.Sequential(nn.Linear(2, 2)), make_gpt(), Layers()]
    reported = []
    for network in networks:
        built(network, plan_for("single", 1), Ranks())
        reported.append(capsys.readouterr().err)
    # torch's constructors initialize no other values, and GPT has a method reset_parameters
    assert reported[:2] == ["", ""]
    assert "Layers was built on the meta device" in reported[2]
    assert "build Layers in configure_model" in reported[2]


class Configured(Module):
    """Module that creates its network on the meta device in ``configure_model``."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.network = self.make()


def with_a_body_on_a_real_device() -> nn.Module:
    with torch.device("cpu"):
        body = Layers()
    return nn.Sequential(body, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (make_gpt, None),
        (with_a_body_on_a_real_device, None),
        (lambda: nn.Sequential(nn.Linear(2, 2), Layers()), "build Layers on a real device in configure_model"),
    ],
)
def test_a_module_that_configures_its_model_is_not_reported(
    make: Make, reported: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Configured(make)
    module.configure_model()
    built(module, plan_for("single", 1), Ranks())
    text = capsys.readouterr().err
    assert ("was built on the meta device" in text) == (reported is not None)
    assert (reported or "") in text


def test_a_submodule_that_is_not_on_meta_keeps_its_weights() -> None:
    body = nn.Linear(3, 3)
    kept = body.weight.detach().clone()
    with torch.device("meta"):
        head = nn.Linear(3, 2)
    network = built(nn.Sequential(body, head), plan_for("single", 1), Ranks())
    assert torch.equal(network[0].weight, kept)
    assert network[1].weight.device.type == "cpu"
    assert network[1].weight.isfinite().all()


class Hiding(nn.Module):
    """Module that stores a network outside of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        dropped = nn.Linear(5, 5)
        dropped.itself = [dropped]  # a reference cycle, which exists until the next collection
        self.seen = nn.Linear(3, 3)
        self.hidden = [nn.Linear(2, 4, bias=False)]


def error_of_hidden_network() -> str:
    plan, ranks = plan_for("zero3", 2), ranks_here()
    with built_in_parts(plan, ranks):
        network = Hiding()
    try:
        built(network, plan, ranks)
    except RoomierError as error:
        return str(error)
    return "no error"


@pytest.mark.more
def test_parameters_outside_the_model_are_rejected(on_ranks: RankPool) -> None:
    first, second = on_ranks(2, error_of_hidden_network)
    assert first == second
    assert first.startswith("configure_model=[(4, 2)]: created 1 parameters")


class Learner(Module):
    """Classifier whose network is created in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.network: nn.Module | None = None
        self.first: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.network is None:
            self.network = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2))

    def on_train_start(self) -> None:
        self.first = whole_tensors(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.network is not None
        return nn.functional.cross_entropy(self.network(batch), (batch.sum(1) > 0).long())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(module: nn.Module, folder: Path, num_ranks: int, **arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = {"strategy": "zero3", "devices": num_ranks} if num_ranks > 1 else {}
    steps = arguments.pop("max_steps", 2)
    trainer = Trainer(default_root_dir=folder, accelerator="cpu", max_steps=steps, **quiet, **strategy)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(x, batch_size=4), **arguments)
    return trainer


def weights_at_the_start(folder: Path, num_ranks: int) -> dict[str, Tensor]:
    seed(3)
    module = Learner()
    fit(module, folder, num_ranks)
    assert any(not torch.equal(module.first[name], each) for name, each in whole_tensors(module).items())
    return module.first


def test_fit_starts_with_the_weights_of_one_process(on_ranks: RankPool, tmp_path: Path) -> None:
    expected = weights_at_the_start(tmp_path, 1)
    for found in on_ranks(2, weights_at_the_start, tmp_path, 2):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())


class OnMeta(Learner):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.configure_model()


def resumed(folder: Path, num_ranks: int) -> bool:
    """Return True if two steps, a checkpoint and two more steps equal four steps."""
    seed(3)
    straight = OnMeta()
    fit(straight, folder, num_ranks, max_steps=4)
    seed(3)
    fit(OnMeta(), folder, num_ranks).save_checkpoint(folder / "saved")
    seed(4)
    second = OnMeta()
    fit(second, folder, num_ranks, max_steps=4, ckpt_path=folder / "saved")
    ours, theirs = whole_tensors(second), whole_tensors(straight)
    return all(torch.equal(ours[name], each) for name, each in theirs.items())


@pytest.mark.more
def test_a_model_on_meta_resumes(on_ranks: RankPool, tmp_path: Path) -> None:
    assert resumed(tmp_path / "one", 1)
    assert on_ranks(2, resumed, tmp_path / "two", 2) == [True, True]
