"""Frozen weights in 8 or 4 bits: their values, their size, and the training of adapters on these weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier import RoomierError
from roomier.api.blocks import find_blocks
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import (
    BLOCK_SIZE,
    FORMATS,
    Adapted,
    InFewBits,
    decode,
    encode,
    is_adapter,
    nf4_levels,
)
from roomier.techniques.adapters.lora import adapter_state, apply_lora, merge_lora, quantise_base
from tests.adapters.models import MODELS, loss_of, make_gpt, make_transformer, token_batches
from tests.covering import few

# The levels are from Dettmers et al. 2023, appendix E.
PUBLISHED_LEVELS = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
BYTES_PER_NUMBER = {"int8": 1.0625, "nf4": 0.5625}


def coded(kind: str, code_format: str, targets: str = "blocks") -> nn.Module:
    network = MODELS[kind]()
    plan = AdapterPlan(lora_rank=4, lora_alpha=8, lora_targets=targets, frozen_base=code_format)
    apply_lora(network, find_blocks(network), plan)
    quantise_base(network, plan)
    return network


def rounded_by_hand(values: Tensor, code_format: str) -> Tensor:
    """Round each number to the nearest level of its block, in float64."""
    levels = torch.tensor(PUBLISHED_LEVELS if code_format == "nf4" else [k / 127 for k in range(-127, 128)]).double()
    found = []
    for block in values.flatten().double().split(BLOCK_SIZE):
        scale = block.abs().max()
        nearest = (block[:, None] / scale - levels).abs().argmin(1)
        found.append(levels[nearest] * scale)
    return torch.cat(found).view(values.shape)


def test_nf4_levels_are_equal_to_the_published_levels() -> None:
    assert nf4_levels() == pytest.approx(PUBLISHED_LEVELS, abs=5e-7)


@pytest.mark.parametrize("code_format", FORMATS)
@pytest.mark.parametrize("shape", [(64, 128), (33, 7), (1, 1)])
def test_numbers_are_rounded_to_the_nearest_level(code_format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape) * torch.rand(shape[0], 1)
    codes, scales = encode(values, code_format)
    back = decode(codes, scales, code_format, values.shape, torch.float32)
    torch.testing.assert_close(back, rounded_by_hand(values, code_format).float(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("code_format", FORMATS)
def test_bytes_per_number(code_format: str) -> None:
    codes, scales = encode(torch.randn(256, 256), code_format)
    assert (codes.nbytes + scales.nbytes) / 256**2 == BYTES_PER_NUMBER[code_format]


def test_the_error_on_normal_weights_matches_the_formats() -> None:
    """Compare the error with the expected values.

    A step of int8 is 1/127 of the largest of 64 numbers, which is about 2.5 sigma. The rounding error is sqrt(1/12) of
    a step, or 0.6 % of sigma. 16 levels of equal frequency have an error of 9 to 10 %. 16 even steps (int4) have a
    larger error.
    """
    torch.manual_seed(0)
    values = torch.randn(2**18)

    def error(code_format: str) -> float:
        return float((decode(*encode(values, code_format), code_format, values.shape, torch.float32) - values).std())

    assert 0.004 < error("int8") < 0.008
    assert 0.07 < error("nf4") < 0.1
    blocks = values.view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(1, keepdim=True)
    even = (blocks / scales * 7).round() / 7 * scales
    assert error("nf4") < 0.95 * float((even - blocks).std())


@pytest.mark.parametrize("code_format", FORMATS)
def test_zero_blocks_and_the_largest_number_are_exact(code_format: str) -> None:
    values = torch.cat([torch.zeros(64), torch.randn(64)])
    back = decode(*encode(values, code_format), code_format, values.shape, torch.float32)
    assert torch.equal(back[:64], values[:64])
    largest = values.abs().argmax()
    assert back[largest] == pytest.approx(values[largest].item(), rel=1e-6)


@pytest.mark.parametrize("code_format", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_equal_to_gradients_of_the_rounded_weights(kind: str, code_format: str) -> None:
    network = coded(kind, code_format)
    plain = MODELS[kind]()
    with torch.no_grad():
        for name, layer in network.named_modules():
            if isinstance(layer, InFewBits):
                plain.get_submodule(name).weight.copy_(layer.weight)
    apply_lora(plain, find_blocks(plain), AdapterPlan(lora_rank=4, lora_alpha=8))
    for each in adapter_state(network).values():
        each.normal_(std=0.1)
    plain.load_state_dict(adapter_state(network), strict=False)
    batch = token_batches(1)[0]
    losses = [loss_of(each, batch) for each in (network, plain)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for each in losses:
        each.backward()
    expected = dict(plain.named_parameters())
    for name, each in network.named_parameters():
        if is_adapter(name):
            torch.testing.assert_close(each.grad, expected[name].grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("code_format", FORMATS)
def test_a_dtype_conversion_of_the_model_does_not_change_codes(code_format: str) -> None:
    network = coded("gpt", code_format)
    before = {name: each.clone() for name, each in network.named_buffers() if "weight_" in name}
    network.bfloat16().half().float()
    now = dict(network.named_buffers())
    assert before
    assert all(torch.equal(now[name], each) and now[name].dtype == each.dtype for name, each in before.items())


def test_no_weight_is_saved_for_backward() -> None:
    layer = nn.Sequential(nn.Linear(512, 512, bias=False))
    apply_lora(layer, [], AdapterPlan(lora_rank=2, lora_targets="0"))
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    def most() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            layer(torch.randn(3, 512, requires_grad=True))
        return max(kept)

    assert most() == 512**2
    quantise_base(layer, AdapterPlan(lora_rank=2, lora_targets="0", frozen_base="nf4"))
    assert most() < 512 * 4


def test_the_product_is_16_bit_under_autocast_and_in_16_bits() -> None:
    layer = coded("gpt", "nf4").blocks[0].attention.query_key_value  # type: ignore[union-attr, index]
    assert isinstance(layer, Adapted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.randn(2, 32, requires_grad=True))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.lora_B.grad is not None
    assert layer.bfloat16()(torch.randn(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_tied_weight_is_not_quantized() -> None:
    network = make_transformer("gpt2")
    plan = AdapterPlan(lora_rank=4, lora_targets="lm_head,c_fc", frozen_base="nf4")
    apply_lora(network, find_blocks(network), plan)
    quantise_base(network, plan)
    assert network.lm_head.weight is network.transformer.wte.weight
    assert isinstance(network.transformer.h[0].mlp.c_fc, InFewBits)


def test_quantizing_again_has_no_effect_and_another_format_is_rejected() -> None:
    network = coded("gpt", "int8")
    before = copy.deepcopy(network.state_dict())
    quantise_base(network, AdapterPlan(lora_rank=4, frozen_base="int8"))
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())
    with pytest.raises(RoomierError, match="whose weight is in int8 from an earlier run"):
        quantise_base(network, AdapterPlan(lora_rank=4, frozen_base="nf4"))


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 1, self.bias)


def test_custom_forwards_and_weights_that_are_not_finite_are_rejected() -> None:
    plan = AdapterPlan(lora_rank=2, lora_targets="0", frozen_base="nf4")
    odd = nn.Sequential(Shifted(4, 4))
    apply_lora(odd, [], plan)
    with pytest.raises(RoomierError, match="does not use the forward method of"):
        quantise_base(odd, plan)
    broken = nn.Sequential(nn.Linear(4, 4))
    apply_lora(broken, [], plan)
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.inf
    with pytest.raises(RoomierError, match="is not finite"):
        quantise_base(broken, plan)


def test_merging_removes_the_codes() -> None:
    network = coded("gpt", "int8")
    merge_lora(network)
    assert not list(network.buffers())
    assert set(network.state_dict()) == set(make_gpt().state_dict())


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.parametrize("code_format", few(FORMATS))
def test_layers_compile_as_one_graph(code_format: str) -> None:
    torch._dynamo.reset()
    layer = coded("gpt", code_format).blocks[0].attention.out  # type: ignore[union-attr, index]
    nn.init.normal_(layer.lora_B)
    x = torch.randn(2, 32, requires_grad=True)
    expected = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(expected.sum(), x), rtol=1e-5, atol=1e-6
    )
