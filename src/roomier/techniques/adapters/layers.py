"""Linear layers with an adapter and, optionally, quantized frozen weights.

[Note: layers change their class in place]
Adding an adapter to a layer changes the layer's class to a class that has the old class as a base, as ``fully_shard``
does. The layer therefore keeps its place in the model, its names in the state dict and its hooks, references to it
remain valid, and ``isinstance(layer, nn.Linear)`` is still true. In a quantized layer, the ``forward`` methods call
each other in the order ``[Adapted, InFewBits, nn.Linear]``.

- ``"int8"``: 255 evenly spaced levels between minus and plus the largest magnitude of the block.
- ``"nf4"``: the 16 levels of NormalFloat (Dettmers et al. 2023, "QLoRA", section 3 and appendix E). Normally
  distributed numbers are rounded to each level about equally often. Two codes are stored in one byte.

Scales are float32, so a number occupies 1.0625 bytes in int8, or 0.5625 bytes in nf4.
"""

from __future__ import annotations

import copyreg
import math
import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roomier.core.errors import RoomierError

BLOCK_SIZE = 64
FORMATS = ("int8", "nf4")
_LARGEST_INT8 = 127


def encode(values: Tensor, code_format: str) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of ``values`` in row-major order, both as 1-D tensors.

    Args:
        values: tensor of any shape.
        code_format: ``"int8"`` or ``"nf4"``.

    Returns:
        The codes are int8 with one code per number, or uint8 with two codes per byte (the first code in the high bits).
        The last block is padded. The scales are float32 bit patterns stored as int32, so that converting the dtype of a
        module does not change the scales.
    """
    flat = values.detach().reshape(-1).float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(1)
    scaled = blocks / scales.where(scales > 0, 1.0)[:, None]
    if code_format == "int8":
        codes = (scaled * _LARGEST_INT8).round().to(torch.int8).view(-1)
    else:
        levels = torch.tensor(NF4_LEVELS, device=values.device)
        nearest = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
        codes = nearest[:, 0] * 16 + nearest[:, 1]
    return codes, scales.view(torch.int32)


def decode(codes: Tensor, scales: Tensor, code_format: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the values that ``codes`` and ``scales`` represent. The values are computed in float32 and then cast to
    ``dtype``."""
    factors = scales.view(torch.float32)[:, None]
    if code_format == "int8":
        values = codes.view(-1, BLOCK_SIZE).float().mul_(factors / _LARGEST_INT8)
    else:
        values = F.embedding(codes.int(), _nf4_pairs(codes.device)).view(-1, BLOCK_SIZE).mul_(factors)
    return values.view(-1)[: math.prod(shape)].view(shape).to(dtype)


def nf4_levels() -> list[float]:
    """Return the 16 levels of NF4 in ascending order from -1 to 1.

    The levels are zero, 8 quantiles of the normal distribution above zero, and 7 quantiles below zero, all divided by
    the largest quantile. On each side, the probabilities of the quantiles are evenly spaced between 1/2 and an
    outermost probability, which is the same for both sides.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    above = torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:]
    below = torch.linspace(0.5, outermost, 8, dtype=torch.float64)[1:]
    quantiles = torch.cat([-torch.special.ndtri(below).flip(0), torch.zeros(1), torch.special.ndtri(above)])
    return [float(each) for each in quantiles / quantiles[-1]]


NF4_LEVELS = nf4_levels()
_kept: dict[torch.device, Tensor] = {}


def _nf4_pairs(device: torch.device) -> Tensor:
    """Return the two levels that each byte encodes, as a float32 tensor of shape ``(256, 2)``.

    The tensor is cached without ``functools.cache``, because compilers ignore that decorator.
    """
    if device in _kept:
        return _kept[device]
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    if type(pairs) is Tensor and not pairs.is_inference():  # do not cache fake tensors and inference tensors
        _kept[device] = pairs
    return pairs


ADAPTER_NAMES = ("lora_A", "lora_B")


def is_adapter(name: str) -> bool:
    """Return True if ``name`` is the qualified name of a parameter of an adapter."""
    return name.rpartition(".")[2] in ADAPTER_NAMES


def is_adaptable(layer: nn.Module) -> bool:
    """Return True if ``layer`` multiplies its input by one matrix, as ``nn.Linear`` and ``Conv1D`` of Hugging Face's
    GPT-2 do."""
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return True if the weight is stored with shape ``(in, out)``, as in ``Conv1D``, instead of ``(out, in)``."""
    found = sys.modules.get("transformers.pytorch_utils")  # if such a layer exists, transformers is already imported
    return found is not None and isinstance(layer, found.Conv1D)


class Adapted(nn.Module):
    """Mixin that adds ``scale * B A dropout(x)`` to the output of a layer (Hu et al. 2021, section 4.1).

    Attributes:
        lora_A: first matrix of the adapter, with shape ``(rank, in)`` for ``nn.Linear``, and ``(in, rank)`` if the
            weight of the layer has shape ``(in, out)``.
        lora_B: second matrix of the adapter, with shape ``(out, rank)`` for ``nn.Linear``, and ``(rank, out)`` if the
            weight of the layer has shape ``(in, out)``.
        lora_scale: alpha / rank.
        lora_dropout: dropout probability of the input of the adapter.
        is_in_out: True if the weight of the layer has shape ``(in, out)``.
    """

    lora_A: nn.Parameter  # noqa: N815  all programs that read adapters use this name
    lora_B: nn.Parameter  # noqa: N815
    lora_scale: float
    lora_dropout: float
    is_in_out: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer plus the output of the adapter, in the dtype of the layer's output."""
        output: Tensor = super().forward(x)
        a, b = (self.lora_A, self.lora_B) if self.is_in_out else (self.lora_A.T, self.lora_B.T)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(a.dtype)  # adapters of 16-bit weights are float32
        if self.lora_dropout and self.training:
            x = F.dropout(x, self.lora_dropout)
        return output + (x @ a * self.lora_scale @ b).to(output.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer as its original class and its mixins, because its current class cannot be imported."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        made_by, _, *rest = reduced
        if made_by is not copyreg.__newobj__:  # type: ignore[attr-defined]
            problem = f"has custom pickling in {plain_class(self).__name__}, which omits the adapter"
            raise RoomierError("layer", type(self).__name__, problem, "Save the state_dict or a checkpoint instead")
        mixins = (Adapted, InFewBits) if isinstance(self, InFewBits) else (Adapted,)
        return (_empty_layer, (plain_class(self), mixins), *rest)


class InFewBits(nn.Module):
    """Mixin that stores the frozen weight as codes and decodes it temporarily for the matrix products of the forward
    and backward passes.

    Attributes:
        weight_codes: buffer of codes from :func:`roomier.techniques.adapters.layers.encode`.
        weight_scales: buffer of scales from the same function.
        weight_format: format of the codes.
        weight_shape: shape of the weight.
        weight_dtype: dtype of the weight.
        is_in_out: True if the weight has shape ``(in, out)``.
        bias: bias of the layer, not quantized.
        constant_buffers: names of the buffers that are never sent to other ranks.
    """

    weight_codes: Tensor
    weight_scales: Tensor
    weight_format: str
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    is_in_out: bool
    bias: nn.Parameter | None
    constant_buffers = ("weight_codes", "weight_scales")

    @property
    def weight(self) -> Tensor:
        """Decoded weight, without a gradient. The weight is decoded on each access."""
        return self.decoded(self.weight_dtype)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the decoded weight in ``dtype``."""
        return decode(self.weight_codes, self.weight_scales, self.weight_format, self.weight_shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of ``x`` and the decoded weight, plus the bias, in the dtype of ``x`` or of autocast."""
        device_type = x.device.type
        x = x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x
        product: Tensor = _ProductWithFrozen.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _ProductWithFrozen(torch.autograd.Function):
    """Product of an input of shape ``(..., in)`` and the weight of a layer, without saving the decoded weight for
    backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: InFewBits) -> Tensor:
        ctx.layer = layer
        weight = layer.decoded(x.dtype)
        return x @ (weight if layer.is_in_out else weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight = ctx.layer.decoded(gradient.dtype)
        return gradient @ (weight.T if ctx.layer.is_in_out else weight), None


@cache
def _class_of(plain: Any, mixins: tuple[Any, ...]) -> Any:
    name = "".join(each.__name__ for each in (*mixins, plain))
    facts = {"plain_class": plain, "is_in_out": not issubclass(plain, nn.Linear), "__module__": plain.__module__}
    return type(name, (*mixins, plain), facts)


def _empty_layer(plain: Any, mixins: tuple[Any, ...]) -> Any:
    made = _class_of(plain, mixins)
    return made.__new__(made)


def plain_class(layer: nn.Module) -> Any:
    """Return the original class of an adapted layer."""
    return getattr(type(layer), "plain_class", type(layer))


def add_adapter(layer: nn.Module, rank: int, scale: float, dropout: float) -> None:
    """Convert ``layer`` to an :class:`Adapted` layer in place. The output of the layer does not change.

    ``A`` is sampled on the CPU from the distribution that ``nn.Linear`` uses for weights, as in published
    implementations. The paper specifies a normal distribution without its standard deviation. ``B`` is zero. If the
    weights are on the meta device, the adapters are still initialized with values. Adapters of 16-bit weights are
    float32.

    Args:
        layer: layer for which :func:`is_adaptable` is True.
        rank: rank of the adapter.
        scale: factor of the adapter's output.
        dropout: dropout probability of the adapter's input.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    num_in, num_out = weight.shape if is_transposed(layer) else weight.shape[::-1]
    a = torch.empty(rank, num_in).uniform_(-(num_in**-0.5), num_in**-0.5)
    b = torch.zeros(num_out, rank)
    dtype = torch.float32 if weight.itemsize < 4 else weight.dtype
    device = torch.device("cpu") if weight.is_meta else weight.device
    layer.__class__ = _class_of(plain_class(layer), (Adapted,))
    assert isinstance(layer, Adapted)
    for name, each in (("lora_A", a), ("lora_B", b)):
        values = each.T.contiguous() if is_transposed(layer) else each
        layer.register_parameter(name, nn.Parameter(values.to(device, dtype)))
    layer.lora_scale, layer.lora_dropout = scale, dropout


def rank_of(layer: Adapted) -> int:
    """Return the rank of the adapter."""
    return layer.lora_A.shape[1 if layer.is_in_out else 0]


def put_in_few_bits(layer: Adapted, code_format: str) -> None:
    """Quantize the weight of ``layer`` in place."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    codes, scales = encode(weight, code_format)
    del layer.weight
    layer.__class__ = _class_of(plain_class(layer), (Adapted, InFewBits))
    assert isinstance(layer, InFewBits)
    layer.register_buffer("weight_codes", codes)
    layer.register_buffer("weight_scales", scales)
    layer.weight_format, layer.weight_shape, layer.weight_dtype = code_format, weight.shape, weight.dtype


def product_of(a: Tensor, b: Tensor, scale: float, *, is_in_out: bool) -> Tensor:
    """Return the product that an adapter adds to the weight, in the layout of the weight, in float32 or float64."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    a, b = a.to(dtype), b.to(dtype)
    return (a @ b if is_in_out else b @ a) * scale


def remove_adapter(layer: Adapted) -> None:
    """Merge the adapter into the weight of ``layer`` and restore the original class of ``layer``."""
    assert isinstance(layer.weight, Tensor)
    weight = layer.weight.detach()
    added = product_of(layer.lora_A.detach(), layer.lora_B.detach(), layer.lora_scale, is_in_out=layer.is_in_out)
    merged = nn.Parameter((weight.to(added.dtype) + added).to(weight.dtype), requires_grad=False)
    own = ["lora_A", "lora_B", "lora_scale", "lora_dropout"]
    if isinstance(layer, InFewBits):
        own += ["weight_codes", "weight_scales", "weight_format", "weight_shape", "weight_dtype"]
    for name in own:
        delattr(layer, name)
    layer.__class__ = plain_class(layer)
    layer.weight = merged
