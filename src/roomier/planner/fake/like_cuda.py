"""Differences between GPU and CPU kernels, modeled with fake CPU tensors. The differences come from torch's
documentation, not from measurements.

[Note: like CUDA]
Fake tensors are on the CPU, because a build of torch without CUDA has kernels only for the CPU. The following
differences, which affect the memory of a step on a GPU, are modeled:

- **Attention.** On a GPU, ``scaled_dot_product_attention`` has kernels that support dropout and regenerate the dropout
  mask in backward. The fused CPU kernel does not support dropout (``check_for_dropout`` in ``sdp_utils_cpp.cpp``), so
  without the fused kernel the full scores are saved. Dropout is therefore disabled in the fake environment, and
  attention saves its inputs, its output and one number per row.
- **Autocast.** Operations that CUDA runs in float32 (documentation of ``torch.amp``, "CUDA Ops that can autocast to
  ``float32``") receive copies in float32. A CPU runs ``layer_norm``, ``softmax`` and some other operations with 16-bit
  precision. All other accelerators use CUDA's list. ``cross_entropy`` is not in this list. ``cross_entropy`` computes
  ``log_softmax`` in the dtype of its input, and ``nll_loss`` converts the result to float32. On a CPU, autocast
  converts the input of ``cross_entropy`` to float32.
- **Norms** in 16 bits save their statistics in float32 (``layer_norm_kernel.cu``: ``acc_type``).
- **Optimizers** of ``torch.optim`` and gradient clipping process all parameters together (``foreach``, the default for
  parameters on a GPU), so the temporary tensors of all parameters exist at the same time. ``foreach`` is also the
  default on other accelerators with their own memory.

cuDNN kernels and workspaces, which are not tensors, are not modeled. For an LSTM, the memory that oneDNN's kernel
saves for backward is counted instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_IN_FLOAT32 = (
    "acos asin cosh cumprod cumsum dist erfinv exp expm1 log log10 log1p log2 log_softmax logsumexp norm pow prod "
    "reciprocal renorm rsqrt sinh softmax sum tan cdist cosine_similarity group_norm layer_norm "
    "__pow__ __rpow__ __rtruediv__ __rdiv__"
)
_LOSSES = (
    "binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy gaussian_nll_loss hinge_embedding_loss "
    "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss "
    "normalize pdist poisson_nll_loss smooth_l1_loss soft_margin_loss softmin softplus triplet_margin_loss"
)
_SCALED_DOT_PRODUCT = F.scaled_dot_product_attention
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def autocast_functions() -> dict[Any, Callable[..., Any]]:
    """Return substitutes for the torch functions whose autocast dtype differs between a GPU and a CPU.

    See [Note: like CUDA].
    """
    found: dict[Any, Callable[..., Any]] = {}
    for name in (*_IN_FLOAT32.split(), *_LOSSES.split()):
        for place in (torch, F, Tensor):
            function = getattr(place, name, None)
            if callable(function):
                found[function] = _in_float32(function)
    found[F.cross_entropy] = _cross_entropy
    return found


def attention_functions() -> dict[Any, Callable[..., Any]]:
    """Return the substitute for attention on CUDA; see [Note: like CUDA]."""
    return {_SCALED_DOT_PRODUCT: _attention}


@contextmanager
def attention_like_cuda() -> Iterator[None]:
    """Return a context in which the substitute also applies to torch functions that call attention."""
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _SCALED_DOT_PRODUCT


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(_wide(each) for each in args)
            kwargs = {name: _wide(each) for name, each in kwargs.items()}
        return function(*args, **kwargs)

    return called


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, label_smoothing: float = 0.0, **kwargs: Any
) -> Tensor:
    if not torch.is_autocast_enabled("cpu") or target.is_floating_point() or input.dtype not in _SIXTEEN_BITS:
        smoothing = {"label_smoothing": label_smoothing}
        return _in_float32(F.cross_entropy)(input, target, weight, *args, **smoothing, **kwargs)  # type: ignore[no-any-return]
    logs = F.log_softmax(input, min(1, input.dim() - 1))
    loss = F.nll_loss(logs.float(), target, weight, *args, **kwargs)
    return (
        loss - label_smoothing * logs.sum(min(1, input.dim() - 1), dtype=torch.float32).mean()
        if label_smoothing
        else loss
    )


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _SIXTEEN_BITS else value


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    kernels: Any = torch.backends.cuda
    if kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled():
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
    return _SCALED_DOT_PRODUCT(*args, **kwargs)
