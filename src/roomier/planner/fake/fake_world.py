"""Fake environment that executes the code of a run without memory for tensors and without other ranks.

[Note: values in a dry run]
Tensors are torch's fake tensors on the CPU, which have the same shapes, dtypes and lifetimes as in a run, but no
values. Code that reads a value receives one that is typical of a training step; see [Note: assumed values].

[Note: like CUDA]
Fake tensors are on the CPU, because a build of torch without CUDA has only CPU kernels. The following differences
between GPU and CPU kernels affect the memory of a step and are therefore modeled, according to torch's documentation
and source code:

- **Attention.** On a GPU, the fused kernels of ``scaled_dot_product_attention`` support dropout and regenerate its mask
  in the backward pass. The fused CPU kernel does not (``check_for_dropout`` in ``sdp_utils_cpp.cpp``), so a CPU saves
  the full attention scores. The fake environment therefore disables dropout, and attention saves its inputs, its output
  and one number per row.
- **Autocast.** Operations that CUDA autocasts to float32 (documentation of ``torch.amp``, "CUDA Ops that can autocast
  to ``float32``") receive float32 copies of their inputs, whereas a CPU runs ``layer_norm``, ``softmax`` and some
  others in 16 bits. All other accelerators use CUDA's list. It does not contain ``cross_entropy``, which computes
  ``log_softmax`` in the dtype of its input and converts the result to float32 in ``nll_loss``. On a CPU, autocast
  converts the input of ``cross_entropy`` to float32.
- **Norms** of 16-bit inputs save their statistics in float32 (``layer_norm_kernel.cu``: ``acc_type``).
- **Optimizers** of ``torch.optim`` and gradient clipping use ``foreach`` implementations by default on a GPU and on
  other accelerators with separate memory, so the temporary tensors of all parameters exist at the same time.

The workspaces of cuDNN are not modeled. For an LSTM, the memory that oneDNN saves for backward is counted instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from roomier.core import torch_fake, torch_private
from roomier.core.device.rng import preserved_rng
from roomier.core.log import quiet
from roomier.core.mesh import Mesh
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.planner.fake.answers import Answers
from roomier.planner.fake.rnn import rnn_kernels
from roomier.planner.fake.user_code import locating_errors

T = TypeVar("T")
_FEW_PARTS = 16  # maximum number of chunks that are created separately
_MASKS, _IS_FAKE = "transformers.utils.import_utils", "is_fake_tensor"
"""Function that makes transformers create masks for fake tensors that it omits for real tensors."""


class FakeRanks(Ranks):
    """Simulated ranks, all of which have the same values as this rank.

    Args:
        world: number of ranks, and the rank that this process represents.
        is_pairwise: True to simulate the pairwise sends of gloo ranks; False to simulate NCCL collectives.
        group: process group of the ranks; None means the default group.
        mesh: layout of the ranks. By default, all ranks read different samples.
    """

    def __init__(
        self, world: World, group: dist.ProcessGroup | None = None, mesh: Mesh | None = None, *, is_pairwise: bool
    ) -> None:
        self._is_pairwise = is_pairwise
        super().__init__(world, group, mesh)

    def _of(self, world: World, group: dist.ProcessGroup | None, mesh: Mesh) -> Ranks:
        return FakeRanks(world, group, mesh, is_pairwise=self._is_pairwise)

    def exchange_pairwise(self, device: torch.device) -> bool:
        """Return whether ranks use point-to-point communication."""
        return self._is_pairwise

    def sum(self, values: Tensor) -> Tensor:
        """Return ``values`` multiplied by the number of ranks."""
        return values * self.world.size

    def gather(self, value: T, *, allows_pickle: bool = False) -> list[T]:
        """Return ``value`` for each rank."""
        return [value] * self.world.size

    def from_zero(self, value: T, *, allows_pickle: bool = False) -> T:
        """Return ``value``."""
        return value

    def on_zero(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``."""
        return function()

    def barrier(self) -> None:
        """Return immediately."""


@contextmanager
def fake_world(mesh: Mesh, *, is_pairwise: bool, like: str = "cpu") -> Iterator[Ranks]:
    """Return a context in which tensors and process groups are fake and notices are suppressed.

    Args:
        mesh: layout of the ranks, and the rank that this process represents.
        is_pairwise: True to simulate the pairwise sends of gloo ranks; False to simulate NCCL collectives.
        like: device type whose kernels determine which tensors are saved for backward. ``"cuda"`` simulates the known
            differences of a GPU; see [Note: like CUDA]. All other types use CPU kernels. Except for ``"cpu"`` and
            ``"cuda"``, autocast uses the dtypes of CUDA, and attention saves its scores, because torch has no fused
            attention for many of these devices.

    Raises:
        RoomierError: code inside the context failed. Exceptions of other types are converted to a DryRunError.
    """
    is_cuda, world = like == "cuda", mesh.world
    functions: dict[Any, Any] = {} if like == "cpu" else autocast_functions()
    if is_cuda:
        functions |= {_SCALED_DOT_PRODUCT: _attention}
    if world.size > _FEW_PARTS:
        functions[torch.chunk] = _chunk
    with quiet(), locating_errors(), preserved_rng(), ExitStack() as stack:
        if world.size > 1:
            stack.enter_context(torch_fake.fake_process_group(world.rank, world.size))
        stack.enter_context(torch_fake.fake_tensors())
        stack.enter_context(torch_fake.fake_tensors_on(like))
        stack.enter_context(torch_private.intercept(Answers(is_cuda=is_cuda)))
        stack.enter_context(torch_fake.replaced_kernels(rnn_kernels()))
        if is_cuda:
            # The function mode does not apply in functions of torch that call attention.
            stack.enter_context(_replaced(F, "scaled_dot_product_attention", _attention))
        elif like != "cpu":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if hasattr(masks := sys.modules.get(_MASKS), _IS_FAKE):
            stack.enter_context(_replaced(masks, _IS_FAKE, lambda tensor: False))
        if functions:  # only if necessary, because it adds a check to each function call
            stack.enter_context(torch_private.replace_functions(functions))
        yield FakeRanks(world, is_pairwise=is_pairwise).arranged(mesh)


def _chunk(tensor: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split ``tensor`` like ``torch.chunk``, but return the same tensor for all chunks of equal size.

    This saves time because ``fully_shard`` splits each parameter into as many chunks as there are ranks.
    """
    has_gradient = torch.is_grad_enabled() and not tensor.is_leaf  # each chunk then has its own autograd node
    if chunks <= _FEW_PARTS or has_gradient or not tensor.shape[dim]:
        return tensor.chunk(chunks, dim)
    length = tensor.shape[dim]
    size = -(-length // chunks)
    last = (length - 1) // size
    return (*[tensor.narrow(dim, 0, size)] * last, tensor.narrow(dim, last * size, length - last * size))


@contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    """Return a context in which the attribute ``name`` of ``place`` is ``value``."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


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
