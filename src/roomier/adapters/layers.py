"""Linear layers with an adapter, and with frozen weights in few bits.

[Note: layers become others in place]
A layer is adapted by giving it another class, which has its old one as a base, as ``fully_shard`` does. So it stays
where it is in the model, with its names in the state dict, its hooks, and whoever refers to it; ``isinstance`` finds
``nn.Linear`` as before. ``[Adapted, InFewBits, nn.Linear]`` is the order in which their forwards call each other.
"""

from __future__ import annotations

import copyreg
import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roomier.adapters.codes import decode, encode
from roomier.core.errors import RoomierError

ADAPTER_NAMES = ("lora_A", "lora_B")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this qualified name is that of an adapter."""
    return name.rpartition(".")[2] in ADAPTER_NAMES


def is_adaptable(layer: nn.Module) -> bool:
    """Whether it multiplies with one matrix: ``nn.Linear``, or the ``Conv1D`` that GPT-2 of Hugging Face has."""
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight is stored as [in, out], as ``Conv1D`` does, and not as [out, in]."""
    found = sys.modules.get("transformers.pytorch_utils")  # who has such a layer has imported it
    return found is not None and isinstance(layer, found.Conv1D)


class Adapted(nn.Module):
    """Adds ``scale * B A dropout(x)`` to what the layer computes (Hu et al. 2021, section 4.1).

    Attributes:
        lora_A, lora_B: their product has the layout of the layer's weight. Of ``nn.Linear`` ``B A``, of shapes
            [out, rank] and [rank, in]; where the weight is [in, out], ``A B``, of [in, rank] and [rank, out].
        lora_scale: alpha / rank.
        lora_dropout: probability.
    """

    lora_A: nn.Parameter  # noqa: N815  as every reader of adapters names them
    lora_B: nn.Parameter  # noqa: N815
    lora_scale: float
    lora_dropout: float
    is_in_out: bool  # how the weight is stored

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        a, b = (self.lora_A, self.lora_B) if self.is_in_out else (self.lora_A.T, self.lora_B.T)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(a.dtype)  # adapters of 16-bit weights are kept in float32
        if self.lora_dropout and self.training:
            x = F.dropout(x, self.lora_dropout)
        return output + (x @ a * self.lora_scale @ b).to(output.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By what its class was made of: no file has a class of that name, as pickle looks for it."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        made_by, _, *rest = reduced
        if made_by is not copyreg.__newobj__:  # type: ignore[attr-defined]
            problem = f"is pickled by {plain_class(self).__name__} in its own way, which leaves out the adapter"
            raise RoomierError("layer", type(self).__name__, problem, "Save its state_dict, or a checkpoint")
        mixins = (Adapted, InFewBits) if isinstance(self, InFewBits) else (Adapted,)
        return (_empty_layer, (plain_class(self), mixins), *rest)


class InFewBits(nn.Module):
    """Keeps the frozen weight as codes; it is made of them for the product, in forward and backward, and dropped.

    Attributes:
        weight_codes, weight_scales: buffers, from :func:`roomier.adapters.codes.encode`.
    """

    weight_codes: Tensor
    weight_scales: Tensor
    weight_format: str
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    is_in_out: bool
    bias: nn.Parameter | None
    constant_buffers = ("weight_codes", "weight_scales")  # not sent to other ranks at each step

    @property
    def weight(self) -> Tensor:
        """For code that reads it: made anew each time, and without a gradient."""
        return self.decoded(self.weight_dtype)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        return decode(self.weight_codes, self.weight_scales, self.weight_format, self.weight_shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        device_type = x.device.type
        x = x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x
        product: Tensor = _ProductWithFrozen.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _ProductWithFrozen(torch.autograd.Function):
    """The product of [..., in] with the weight of a layer; autograd's own would keep the weight until backward."""

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
    """The class a layer had before it was adapted."""
    return getattr(type(layer), "plain_class", type(layer))


def add_adapter(layer: nn.Module, rank: int, scale: float, dropout: float) -> None:
    """Make ``layer`` an :class:`Adapted` one, in place; what it computes stays as it is.

    ``A`` is drawn, on the CPU, as ``nn.Linear`` draws its weights: the paper has a normal distribution, whose width it
    does not tell, and this is what published implementations took. ``B`` is zero. Weights without values yet (``meta``)
    get adapters with values. Beside weights of 16 bits they are float32.
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
    return layer.lora_A.shape[1 if layer.is_in_out else 0]


def put_in_few_bits(layer: Adapted, code_format: str) -> None:
    """Keep the weight of ``layer`` as codes, in place."""
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
    """What an adapter adds to the weight, in the layout of the weight and in float32 at least."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    a, b = a.to(dtype), b.to(dtype)
    return (a @ b if is_in_out else b @ a) * scale


def remove_adapter(layer: Adapted) -> None:
    """Give ``layer`` the class and the weight it had, with what the adapter adds."""
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
