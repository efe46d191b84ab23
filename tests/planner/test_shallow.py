"""Deep models that are traced with a few blocks have byte for byte the same timeline as the full model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier.api.adapt import as_module
from roomier.api.blocks import find_blocks
from roomier.api.module import Module, network_of
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.dry_runs import shallow
from roomier.planner.dry_runs.dry_run import DryRun, dry_run
from roomier.planner.dry_runs.repeats import find_repeats, shallow_copy
from roomier.planner.dry_runs.shallow import dry_run_by_depth
from roomier.planner.workload import Workload
from roomier.techniques.parallel.shard import units_of

STRATEGIES = ["single", "ddp", "zero1", "zero2", "zero3", "hsdp"]


def make_plan(
    strategy: str = "single", recompute: str = "none", precision: str = "32-true", accumulate: int = 1
) -> Plan:
    parallel: dict[str, Any] = {"strategy": strategy, "devices": 1 if strategy == "single" else 4}
    if strategy == "hsdp":
        parallel["shard_size"] = 2
    return Plan.from_dict(
        {
            "parallel": {**parallel, "accelerator": "cpu"},
            "precision": {"mode": precision},
            "batch": {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0},
            "optimizer": {"name": "adamw"},
            "activation": {"policy": recompute},
        }
    )


def tokens(length: int = 16) -> Tensor:
    return torch.zeros(2, length, dtype=torch.int64, device="meta")


def gpt(num_layers: int = 8) -> Workload:
    with torch.device("meta"):
        network = GPT(GPTConfig(vocab_size=101, context=16, num_layers=num_layers, num_heads=2, width=32))
    return Workload(as_module(network), (tokens(), tokens()), 2)


def hugging_face(config: str, model: str, batch: dict[str, Any], **sizes: Any) -> Workload:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        network = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return Workload(as_module(network.train()), batch, 2)


ENCODER = {"hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 64}


def llama() -> Workload:
    batch = {"input_ids": tokens(), "labels": tokens()}
    return hugging_face("LlamaConfig", "LlamaForCausalLM", batch, vocab_size=101, num_key_value_heads=2, **ENCODER)


def mixtral() -> Workload:
    batch = {"input_ids": tokens(), "labels": tokens()}
    sizes = {**ENCODER, "vocab_size": 101, "num_key_value_heads": 2, "num_local_experts": 4}
    return hugging_face("MixtralConfig", "MixtralForCausalLM", batch, **sizes)


def t5() -> Workload:
    batch = {"input_ids": tokens(), "labels": tokens(8)}
    sizes = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0}
    return hugging_face("T5Config", "T5ForConditionalGeneration", batch, num_layers=8, num_decoder_layers=9, **sizes)


def vit() -> Workload:
    images = torch.zeros(2, 3, 32, 32, device="meta")
    batch = {"pixel_values": images, "labels": torch.zeros(2, dtype=torch.int64, device="meta")}
    return hugging_face("ViTConfig", "ViTForImageClassification", batch, image_size=32, patch_size=8, **ENCODER)


def check_equal(found: DryRun, whole: DryRun) -> None:
    assert found.intervals == whole.intervals
    assert found.work.keys() == whole.work.keys()
    for part, work in whole.work.items():
        assert found.work[part].flops == pytest.approx(work.flops), part
        assert found.work[part].other_bytes == pytest.approx(work.other_bytes), part


def both(workload: Workload, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[DryRun, DryRun]:
    """Return the dry run by depth, which never traces the full model, and the dry run of the full model."""
    whole = dry_run(workload, plan, is_pairwise=False)

    def of_a_copy(traced: Workload, *args: Any, **options: Any) -> DryRun:
        assert traced.module is not workload.module
        return dry_run(traced, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shallow, "dry_run", of_a_copy)
        patch.setattr(shallow, "_saves", lambda repeats: True)
        return dry_run_by_depth(workload, plan, is_pairwise=False), whole


@pytest.mark.parametrize(
    ("strategy", "recompute"), [("single", "none"), pytest.param("zero3", "full", marks=pytest.mark.slow)]
)
def test_the_timeline_of_a_deep_model_equals_the_full_trace(
    strategy: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_equal(*both(gpt(), make_plan(strategy, recompute), monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [gpt, llama, mixtral, t5, vit])
def test_every_strategy_and_model(make: Any, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal(*both(make(), make_plan(strategy), monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recompute", ["full", "selective", "every_n"])
def test_every_strategy_with_recomputation_and_accumulation(
    strategy: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(strategy, recompute, "bf16-mixed", accumulate=2)
    check_equal(*both(gpt(14 if recompute == "every_n" else 8), plan, monkeypatch))


@pytest.mark.more
@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = t5()
    rows = find_repeats(workload, make_plan(), least=6)
    assert [(each.first, each.count) for each in rows] == [(1, 7), (1, 8)]  # the first block has the position bias
    check_equal(*both(workload, make_plan(), monkeypatch))


class Layer(nn.Module):
    def __init__(self, number: int, window: int) -> None:
        super().__init__()
        self.number = number
        self.window = window
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.stack([x.roll(step, dims=0) for step in range(self.window)]).mean(dim=0)
        result: Tensor = x + self.norm(self.linear(seen)).relu()
        return result


class Layers(Module):
    """Blocks that differ in a plain attribute."""

    def __init__(self, windows: list[int], *, by_number: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, window) for number, window in enumerate(windows))
        self.by_number = by_number
        self.count = len(windows)

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        for number in range(self.count) if self.by_number else range(len(self.layers)):
            x = self.layers[number](x)
        return x.square().mean()


def layers(windows: list[int], **options: Any) -> Workload:
    return Workload(Layers(windows, **options), torch.zeros(4, 8), 4)


@pytest.mark.more
def test_alternating_blocks_repeat_with_their_period(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = layers([2, 2, 5] * 7 + [2])
    (row,) = find_repeats(workload, make_plan(), least=6)
    assert (row.first, row.length, row.count) == (0, 3, 7)
    check_equal(*both(workload, make_plan(), monkeypatch))


def test_blocks_that_differ_in_an_attribute_are_all_traced() -> None:
    workload = layers([2, 3, 2, 2, 3, 3, 2, 3, 2, 2])
    assert find_repeats(workload, make_plan(), least=6) == []
    assert dry_run_by_depth(workload, make_plan()) == dry_run(workload, make_plan())


@pytest.mark.more
@pytest.mark.parametrize(("num_layers", "is_whole"), [(9, True), (10, False)])
def test_a_short_row_is_traced_in_full(num_layers: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = layers([2] * num_layers)
    traced: list[int] = []

    def counting(each: Workload, *args: Any, **options: Any) -> DryRun:
        traced.append(len(network_of(each.module).layers))  # type: ignore[arg-type]
        return dry_run(each, *args, **options)

    monkeypatch.setattr(shallow, "dry_run", counting)
    dry_run_by_depth(workload, make_plan())
    assert traced == ([9] if is_whole else [5, 4])


def test_a_model_that_indexes_its_blocks_is_traced_in_full() -> None:
    workload = layers([2] * 12, by_number=True)
    assert find_repeats(workload, make_plan(), least=6)
    assert dry_run_by_depth(workload, make_plan()) == dry_run(workload, make_plan())


@pytest.mark.more
def test_layers_that_are_large_in_the_copy_are_compared_with_the_full_model() -> None:
    """An embedding with 1/60 of the model's parameters is gathered with the root, although it has 1/10 of the copy's
    parameters."""
    with torch.device("meta"):
        network = GPT(GPTConfig(vocab_size=96, context=16, num_layers=24, num_heads=2, width=32))
    module = as_module(network)
    rows = find_repeats(Workload(module, None, 1), make_plan(), least=6)
    copied = shallow_copy(module, rows, [4], num_last=2)
    assert len(units_of(network, find_blocks(network))) == 24
    assert len(units_of(network_of(copied.module), find_blocks(network_of(copied.module)))) == 4
    assert len(network.blocks) == 24  # the model is unchanged
    assert sum(1 for _ in network_of(copied.module).modules()) < sum(1 for _ in network.modules())
    assert [copied.place_in_model(f"blocks.{number}") for number in range(4)] == [f"blocks.{n}" for n in (0, 1, 22, 23)]


def test_a_plan_that_names_blocks_requires_a_full_trace() -> None:
    plan = Plan.from_dict({"optimizer": {"name": "adamw"}, "adapter": {"lora_rank": 2, "lora_targets": "blocks.3.*"}})
    assert find_repeats(gpt(), plan, least=6) == []
