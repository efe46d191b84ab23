"""Tests of models, batches and plans that do not support a context size."""

import pytest
import torch
from torch import nn

from roomier import Module, Trainer
from roomier.api.module import network_of
from roomier.core.errors import RoomierError
from roomier.plan import Plan, plan_from_flags
from roomier.planner.context import find_context_region
from roomier.techniques.context.check import check_blocks
from roomier.techniques.context.region import SequenceRegion
from tests.context.networks import (
    NETWORKS,
    Batch,
    Packed,
    batch_of,
    hugging_face,
    llama,
    loss_of,
    mixtral,
    of_blocks,
    tokens,
)


class Loss(Module):
    def __init__(self, name: str, network: nn.Module) -> None:
        super().__init__()
        self.name, self.network = name, network

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return loss_of(self.name, self.network, batch)


def examine(name: str, network: nn.Module, size: int = 2, num_ranks: int = 4, length: int = 16) -> SequenceRegion:
    """Find and check the region of ``network``, as rank 0 does before a fit."""
    strategy = {"name": "zero3", "context_parallel_size": size}
    plan = plan_from_flags(strategy=strategy, devices=num_ranks, accelerator="cpu")
    module = Loss(name, network)
    region, examples = find_context_region(module, batch_of(name, 2, length, 1), plan)
    if failing := check_blocks(network_of(module), examples, size):
        region, _ = find_context_region(module, batch_of(name, 2, length, 1), plan, failing)
    return region


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("convolution", "its output depends on other tokens"),
        ("detached mean", "its output depends on other tokens"),
        ("statistics", "writes to its buffers"),
        ("positions", "its output depends on other tokens"),
        ("mask", "its mask has"),
        ("in place", "modifies its argument in place"),
        ("by hand", "scaled_dot_product_attention, but none does"),
    ],
)
def test_blocks_that_mix_tokens_are_rejected(other: str, message: str) -> None:
    with pytest.raises(RoomierError, match=message) as caught:
        examine("encoder", of_blocks(other))
    assert caught.value.field == "context_parallel_size"
    assert "context_parallel_size=1" in caught.value.action


def test_each_kind_of_block_is_checked() -> None:
    with pytest.raises(RoomierError, match=r"network.layers.1 .* its output depends on other tokens"):
        examine("encoder", of_blocks("", "convolution"))


def test_containers_of_hidden_states() -> None:
    assert [block.is_first for block in examine("encoder", Packed(is_dict=True)).blocks] == [True, False]
    with pytest.raises(RoomierError, match=r"no argument of network.layers.0 .* Pass the hidden state as a tensor"):
        examine("encoder", Packed(is_dict=False))


def test_position_wise_blocks_are_accepted() -> None:
    region = examine("encoder", of_blocks(""))
    assert [block.name for block in region.blocks] == ["network.layers.0", "network.layers.1"]
    assert SequenceRegion.from_data(region.as_data()) == region


def encoder_decoder() -> nn.Module:
    return hugging_face("BartForConditionalGeneration", config="BartConfig", **OF_BART)


OF_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mixtral(output_router_logits=True), "layers.0.mlp.gate.* are read outside of the blocks"),
        (lambda: llama(2, attn_implementation="eager"), "scaled_dot_product_attention, but none does"),
        (lambda: llama(2, attn_implementation="flex_attention"), "flex_attention, which LlamaAttention calls"),
        (encoder_decoder, "cross-attention"),
        (lambda: llama(2, num_attention_heads=6, hidden_size=36, head_dim=6), "must divide the number of attention"),
    ],
    ids=["router", "eager", "flex", "cross-attention", "heads"],
)
def test_hugging_face_models_that_are_rejected(make: object, message: str) -> None:
    with pytest.raises(RoomierError, match=message):
        examine("llama", make(), size=4)  # type: ignore[operator]


def test_the_nearest_size_is_named() -> None:
    with pytest.raises(RoomierError, match=r"number of attention heads \(4.*Use context_parallel_size=4"):
        examine("gpt", NETWORKS["gpt"](), size=8, num_ranks=8)
    with pytest.raises(RoomierError, match=r"at least 8 tokens.*has 6.*Use context_parallel_size=2"):
        examine("gpt", NETWORKS["gpt"](), size=4, length=6)


def test_a_context_size_implies_seeding_by_events() -> None:
    implied, default = (
        plan_from_flags(strategy={"name": "zero2", "context_parallel_size": size}, devices=4) for size in (2, 1)
    )
    assert (implied.batch.seeding, default.batch.seeding) == ("events", "stream")
    assert Plan.from_dict(implied.to_dict()) == implied


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"strategy": {"name": "zero3", "context_parallel_size": 3}}, "Use context_parallel_size=2"),
        ({"strategy": {"name": "hsdp", "context_parallel_size": 4, "shard_size": 2}}, "must divide the shard_size"),
        ({"strategy": {"name": "ddp", "context_parallel_size": 2, "gradient_compression": "powersgd"}}, "compression"),
        ({"strategy": {"name": "zero1", "context_parallel_size": 2}, "optimizer": "onebit_adam"}, "optimizer='adamw'"),
        ({"strategy": {"name": "zero3", "context_parallel_size": 2}, "compile": True}, "compile=False"),
        ({"strategy": {"name": "zero3", "context_parallel_size": 0}}, "must be at least 1"),
        ({"strategy": {"name": "ddp", "context_parallel_size": 2}, "seeding": "stream"}, "Set seeding='events'"),
    ],
)
def test_plans_that_are_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(RoomierError, match=message):
        plan_from_flags(devices=4, accelerator="cpu", **flags)  # type: ignore[arg-type]


def test_the_settings_of_deepspeed_are_converted() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}
    trainer = Trainer(strategy=config, devices=4, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.plan.parallel.context_parallel_size == 2
    assert trainer.num_data_ranks == 2
    assert "2 ranks per sequence" in str(trainer.plan)


def test_a_batch_without_sequences_is_rejected() -> None:
    batch = tokens(2, 16)
    plan = plan_from_flags(strategy={"name": "ddp", "context_parallel_size": 2}, devices=2, accelerator="cpu")
    flat = {name: each[:, 0] for name, each in batch.items()}
    with pytest.raises(RoomierError, match="no tensor of the batch has two dimensions"):
        find_context_region(Loss("gpt", NETWORKS["gpt"]()), flat, plan)
