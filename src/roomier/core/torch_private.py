"""Private names of torch that roomier uses, checked with torch 2.11 and 2.13."""

import copy
import ctypes
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten

from roomier.core.errors import PlanError

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

OpOverload = torch._ops.OpOverload
disabled_torch_function = torch._C._disabled_torch_function_impl
iter_leaves, map_leaves, split_leaves, join_leaves = tree_iter, tree_map, tree_flatten, tree_unflatten
BACKGROUND_GROUP = "roomier background"


def make_wrapper(
    cls: type[AnyTensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool = False
) -> AnyTensor:
    """Return a tensor of class ``cls`` with this shape, contiguous strides and no memory."""
    made: AnyTensor = torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
    )
    return made


def keeps_graph() -> bool:
    """Return whether the current backward pass retains its graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def writes_to_arguments(operator: torch._ops.OpOverload) -> bool:
    """Return whether ``operator`` works in place or has an ``out`` argument."""
    return bool(operator._schema.is_mutable)


def is_shared(tensor: Tensor) -> bool:
    """Return whether ``tensor`` shares its memory with another tensor."""
    use_count = torch._C._storage_Use_Count  # counts the tensor, the storage's Python object, and other users
    return int(use_count(tensor.untyped_storage()._cdata)) > 2


def iter_tensors(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors among the leaves of ``tree``."""
    return (each for each in iter_leaves(tree) if isinstance(each, Tensor))


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """Return how many times ``tensor``, or a view of ``tensor``, was modified in place."""
    return int(tensor._version)


def detached(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without its graph. Inside :func:`intercept`, ``detach`` alone would not track later writes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def viewed(tensor: Tensor) -> Tensor:
    """Return the base of ``tensor`` if it is a view, or ``tensor`` itself."""
    return tensor if tensor._base is None else tensor._base


def cast_parameter(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter from which autocast created ``tensor``; None for other tensors. ``tensor`` must not be a
    view."""
    created_by = tensor.grad_fn
    if created_by is None or created_by.name() != "ToCopyBackward0":
        return None
    source = getattr(created_by.next_functions[0][0], "variable", None)
    return source if isinstance(source, nn.Parameter) else None


def product_operators() -> frozenset[torch._ops.OpOverload]:
    """Return the operators of matrix products and convolutions that are dispatched below autograd."""
    names = "mm addmm bmm baddbmm linear convolution convolution_overrideable mkldnn_convolution _addmm_activation"
    names += " _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _int_mm _trilinear"
    return _overloads(names.split())


def attention_operators() -> frozenset[torch._ops.OpOverload]:
    """Return the kernels of ``scaled_dot_product_attention`` except ``math``, and the kernels for variable lengths."""
    ways = "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention fused_attention_overrideable"
    ways += " attention_math_for_mps"
    names = [f"_scaled_dot_product_{way}" for way in ways.split()]
    return _overloads([*names, "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"])


def _overloads(names: Sequence[str]) -> frozenset[torch._ops.OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]  # by version
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return frozenset(each for each in overloads if not writes_to_arguments(each))


@contextmanager
def seen_as_saved(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``see`` with each tensor that autograd saves inside the context. Outer hooks remain active."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = around or (lambda tensor: tensor, lambda tensor: tensor)

    def seen(tensor: Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(seen, unpack):
        yield


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer with the result of ``convert``, in the same way as ``Module.to``."""
    module._apply(convert)  # type: ignore[no-untyped-call]


def leave_out_of_ddp(module: nn.Module, names: Sequence[str]) -> None:
    """Exclude parameters and buffers of ``module``, which DDP does not wrap yet, from the communication of DDP."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]


def reset_of_torch(module: nn.Module) -> Callable[[], None] | None:
    """Return ``_reset_parameters`` of torch modules that define it instead of ``reset_parameters``; otherwise None."""
    if isinstance(module, (nn.MultiheadAttention, nn.Transformer)):
        return module._reset_parameters
    return None


def initializer_of_transformers(module: nn.Module) -> Callable[[], None] | None:
    """Return the method that initializes a model of transformers 4.48 to 5 (``initialize_weights``); otherwise None."""
    found = getattr(module, "initialize_weights", None)
    return found if callable(found) and callable(getattr(module, "_init_weights", None)) else None


def mesh_without_groups(device_type: str, ranks: Sequence[Sequence[int]]) -> Any:
    """Return a DeviceMesh of ``ranks`` that creates no process groups, so its tensors cannot be redistributed."""
    from torch.distributed.device_mesh import DeviceMesh  # slow to import

    return DeviceMesh(device_type, list(ranks), _init_backend=False)


def add_plain_copies(network: nn.Module, memo: dict[int, Any]) -> None:
    """Add to ``memo``, for each module in ``network`` that is sharded by ``fully_shard``, a copy with the original
    class and without the hooks of ``fully_shard``. ``copy.deepcopy`` rejects these modules, but accepts ``memo``."""
    sharded: list[Any] = [each for each in network.modules() if hasattr(each, "_get_fsdp_state")]
    for each in sharded:  # all copies before their contents, which can refer to each other
        memo[id(each)] = object.__new__(type(each).__mro__[each._orig_cls_mro_index])
    for each in sharded:
        state = each._get_fsdp_state()
        memo[id(state)] = state  # an attribute of the module, which the copy does not use
        handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
        added = {hook.id for handle in handles for hook in getattr(handle, "handles", (handle,))}
        own = dict(each.__dict__)
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            own[name] = OrderedDict((number, hook) for number, hook in own[name].items() if number not in added)
        memo[id(each)].__dict__.update(copy.deepcopy(own, memo))


def offsets_of_shard(tensor: Any) -> tuple[int, ...]:
    """Return the offset of this rank's shard of the DTensor ``tensor`` in each dimension."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def is_being_gathered(unit: Any) -> bool:
    """Return whether the ``fully_shard`` module ``unit`` has started an all-gather for which it has not waited yet."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and group._all_gather_result is not None


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has hooks from ``register_post_accumulate_grad_hook``."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def intercept(handler: Callable[..., Any], *, lets_compile: bool = False) -> AbstractContextManager[Any]:
    """Return a context that calls ``handler(func, types, args, kwargs)`` instead of each dispatched operation.

    Operations of a backward pass are included. The handler can return NotImplemented to delegate the operation to a
    tensor subclass.

    Args:
        lets_compile: if True, run the compiled code of compiled functions. The handler then receives only the operators
            that the compiled code calls. If False, compiled functions run eagerly.
    """
    return _CompiledInterception(handler) if lets_compile else _Interception(handler)


_ASKS_DEVICE = torch.ops.prim.device.default


class _Interception(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # otherwise, operators such as flex_attention would raise an error

    def __init__(self, handler: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handler = handler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ASKS_DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # two thirds of the operations on fake tensors read the device, so skip the other modes
        return self._handler(func, types, args, kwargs or {})


def replace_functions(functions: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[Any]:
    """Return a context in which functions of torch that accept tensors are replaced.

    Args:
        functions: replacement for each function. A replacement can call the original functions of torch.
    """
    return _Replacements(functions)


class _Replacements(TorchFunctionMode):
    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:  # also replace functions in the recomputation of blocks
            with self, _own_backward():
                named = dict(kwargs or {})
                return torch.autograd.backward(args[0], grad_tensors=named.pop("gradient", None), **named)
        return self._functions.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _own_backward() -> Iterator[None]:
    """Prevent ``torch.autograd.backward`` from calling the active torch function mode, which would disable this mode
    (torch 2.13)."""
    module: Any = torch.autograd
    before = module.has_torch_function
    module.has_torch_function = lambda arguments: False
    try:
        yield
    finally:
        module.has_torch_function = before


class _CompiledInterception(_Interception):  # type: ignore[no-untyped-call]
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def without_interception() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes. ``torch.compile`` never compiles code that was first run inside a
    dispatch mode."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def handles_dispatch(kind: type) -> bool:
    """Return whether tensors of class ``kind`` implement operations on inner tensors, as DTensor does."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own not in (None, torch._C._disabled_torch_dispatch_impl) and kind.__name__ != "FakeTensor"


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass, for example while a block is recomputed."""
    return int(torch._C._current_graph_task_id()) != -1


class LossScalerOfParts(GradScaler):
    """Gradient scaler for optimizers with both sharded and unsharded parameters.

    For a list of gradients, DTensor's kernel checks for infinite values on the ranks of the first gradient, so this
    scaler passes sharded parameters first.

    Attributes:
        unscale_away: function that multiplies the gradients of an optimizer that are not on the device by a factor, and
            returns a 0-dim tensor: 1 if one of them is not finite on any rank, otherwise 0. None if all gradients are
            on the device.
    """

    unscale_away: Callable[[Optimizer, Tensor], Tensor] | None = None

    def _unscale_grads_(self, optimizer: Optimizer, inverse: Tensor, *arguments: Any) -> dict[torch.device, Tensor]:
        groups = optimizer.param_groups
        parameters = [each for group in groups for each in group["params"]]
        parameters.sort(key=lambda each: type(each) is nn.Parameter)
        optimizer.param_groups = [{"params": parameters}]  # the method reads only the key "params"
        try:
            found = super()._unscale_grads_(optimizer, inverse, *arguments)
        finally:
            optimizer.param_groups = groups
        if self.unscale_away is not None:
            away = self.unscale_away(optimizer, inverse).to(inverse.device)
            found[inverse.device] = torch.maximum(found.get(inverse.device, away), away)
        return found


def found_inf(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """Return one 0-dim tensor per device: 1 if ``scaler`` found a gradient of ``optimizer`` that is not finite."""
    return list(scaler._found_inf_per_device(optimizer).values())


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel skips a step with infinite gradients, as fused kernels do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark the optimizer as stepped. Without this mark, schedulers warn if the loss scaler skipped the first step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def last_forward_value(metric: Any) -> Any:
    """Return the result of the last forward pass of a torchmetrics metric (private name, torchmetrics 1.4 to 1.9)."""
    return metric._forward_cache


def load_metric_state(metric: Any, state: Mapping[str, Any], num_updates: int) -> None:
    """Restore the states and the update count of a torchmetrics metric. torchmetrics 1.4 to 1.9 has no public
    setters."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = num_updates
    metric._computed = None


def recompute_metric(metric: Any) -> Any:
    """Compute a torchmetrics metric on all ranks. A cached result is ignored, because only some ranks may have one."""
    metric._computed = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*``compute`` method of metric.*", category=UserWarning)
        return metric.compute()


def scale_each(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each of ``tensors`` by ``factor`` (0-dim), in place, in one call per device and dtype."""
    for _, group in _alike(tensors):
        torch._foreach_mul_(group, factor.to(group[0].device))


def _alike(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield the indices and tensors of each device and dtype, grouped as in ``torch.nn.utils.get_total_norm``."""
    if not tensors:
        return
    for (group,), indices in Optimizer._group_tensors_by_device_and_dtype([list(tensors)], with_indices=True).values():
        yield indices, [each for each in group if each is not None]


def draw_each_towards(tensors: Sequence[Tensor], goals: Sequence[Tensor], weight: float) -> None:
    """Interpolate ``tensors`` toward ``goals`` by ``weight``, in place, in one kernel per device and dtype."""
    if tensors:
        torch._foreach_lerp_(list(tensors), list(goals), weight)


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd tracks ``tensor`` as a view of another tensor."""
    return tensor._base is not None


def without_view(tensor: Tensor, *, may_share: bool) -> Tensor:
    """Return ``tensor``, or a tensor with the same values that is not a view.

    Args:
        may_share: if True, the result may share memory with ``tensor`` without being tracked as a view. In this case,
            autograd does not detect that an in-place write to one tensor changes the other tensor.
    """
    if not is_view(tensor):
        return tensor
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if may_share else tensor.clone()


def forget_unreduced_gradients(unit: Any) -> None:
    """Drop the unsharded gradients that a ``fully_shard`` module retains until they are reduced."""
    for each in _parameters_of(unit):
        each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):  # this attribute exists if the parameter was unsharded at least once
            each._unsharded_param.grad = None


def reduce_missing_gradients_as_zeros(unit: Any) -> None:
    """Make a ``fully_shard`` module reduce zeros for parameters that have gradients only on other ranks.

    The effect is the same as with ``FSDPModule.set_reduce_scatter_unused_params`` of torch 2.13.

    Raises:
        PlanError: the installed version of torch does not support this.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        if not hasattr(group, "reduce_scatter_unused_params"):
            problem = f"is not supported by torch {torch.__version__} with sharded parameters"
            raise PlanError("parallel.find_unused_parameters", True, problem, "Install torch 2.13")
        group.reduce_scatter_unused_params = True


def call_before(unit: Any, moment: str, function: Callable[[], None]) -> None:
    """Call ``function`` immediately before each ``moment`` of a ``fully_shard`` module: ``"pre_forward"``,
    ``"pre_backward"`` or ``"post_backward"``. A module without parameters has no moments."""
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        original = getattr(group, moment)

        def run(*args: Any, _original: Any = original) -> Any:
            function()
            return _original(*args)

        setattr(group, moment, run)


def _parameters_of(unit: Any) -> list[Any]:
    return [each for group in unit._get_fsdp_state()._fsdp_param_groups for each in group.fsdp_params]


def sharded_parameters_of(unit: Any) -> list[nn.Parameter]:
    """Return the sharded parameters of a ``fully_shard`` module."""
    return [each.sharded_param for each in _parameters_of(unit)]


def _has_gradient(each: Any) -> bool:
    if each.unsharded_accumulated_grad is not None:
        return True
    return hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None


def with_gradient(unit: Any) -> int:
    """Return a bit for each parameter of a ``fully_shard`` module: whether its gradient is about to be reduced."""
    groups = unit._get_fsdp_state()._fsdp_param_groups
    if not all(group.reduce_grads for group in groups):
        return 0
    return sum(1 << bit for bit, each in enumerate(_parameters_of(unit)) if _has_gradient(each))


def used_in_window(unit: Any, before: Sequence[bool]) -> list[bool]:
    """Return for each parameter of a ``fully_shard`` module whether this rank has contributed to its gradient.

    Args:
        before: the result before this backward pass, which remains valid while the parameters have gradients.
    """
    return [
        _has_gradient(each) or (was_used and each.sharded_param.grad is not None)
        for each, was_used in zip(_parameters_of(unit), before, strict=True)
    ]


def unshard_and_reshard(unit: Any) -> None:
    """All-gather the parameters of a ``fully_shard`` module, and reshard them as its forward pass does."""
    unit.unshard()
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        if group._reshard_after_forward:
            unit.reshard()


def end_backward_of(unit: Any) -> None:
    """Reduce the gradients of a ``fully_shard`` module now, even if its backward pass did not run."""
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        group.post_backward()


def unreduced_parameters(ddp: DistributedDataParallel) -> list[int] | None:
    """Return the indices of the parameters whose missing gradients prevented the last reduction of DDP; None if all
    gradients were reduced."""
    try:
        ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        *_, indices = str(error).rpartition("did not receive grad for rank")  # names can precede the indices
        return [int(each) for each in re.findall(r"\d+", indices.partition("\n")[0])[1:]]
    return None


def default_store() -> Any:
    """Return the store of the default process group, which all ranks can read and write."""
    return torch.distributed.distributed_c10d._get_default_store()


def forget_sharding(module: nn.Module) -> None:
    """Remove the state that ``fully_shard`` stores for ``module``, so that the module can be sharded again.

    This function does not restore the class, the hooks and the parameters of the module.
    """
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    _composable_state._module_state_mapping.pop(module, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        module.__dict__.pop(key, None)


def process_groups() -> list[Any]:
    """Return all process groups of this process."""
    world: Any = torch.distributed.distributed_c10d._world
    return list(world.pg_names)


def num_calls_by_group() -> dict[str, int]:
    """Return the number of operations that this rank has begun in each process group, except background groups."""
    groups = [each for each in process_groups() if each.group_desc != BACKGROUND_GROUP]
    backends = {each.group_name: map(each._get_backend, each._device_types) for each in groups}
    return {name: sum(each._get_sequence_number_for_group() for each in of) for name, of in backends.items()}


def compile_s() -> float:
    """Return the time in seconds that this process has spent in ``torch.compile``, for forward and backward."""
    from torch._dynamo.utils import compilation_time_metrics

    return float(sum(compilation_time_metrics.get("_compile.compile_inner", ())))


def num_compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def missing_compiler(device: torch.device) -> str | None:
    """Return the missing requirement of ``torch.compile`` for ``device``; None if all requirements are satisfied."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "a C++ compiler"
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton"
    else:
        from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

        init_backend_registration()
        return None if get_scheduling_for_device(device.type) else "a code generator"
    return None


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor (0-dim), computed by the kernel of ``torch.nn.utils.clip_grad_norm_``."""
    norms: dict[int, Tensor] = {}
    for indices, group in _alike(tensors):
        norms.update(zip(indices, torch._foreach_norm(group, 2.0), strict=True))
    return [norms[index] for index in range(len(tensors))]


def join_norms(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of several tensors from their norms, grouped as in ``torch.nn.utils.get_total_norm``.

    Args:
        norms: 0-dim tensors, each with the device and dtype of the tensor whose norm it is.
    """
    if not norms:
        return torch.tensor(0.0)
    joined = [norm.to(norms[0].device) for _, group in _alike(norms) for norm in group]
    total: Tensor = torch.linalg.vector_norm(torch.stack(joined), 2.0)
    return total


def step_without_hooks(optimizer: Optimizer, kind: type[Optimizer] | None = None) -> None:
    """Call ``step`` of ``kind``, by default the class of ``optimizer``, without hooks, without a profiler record, and
    without the step count for schedulers."""
    step: Any = (kind or type(optimizer)).step
    if getattr(step, "hooked", False):  # wrapped by Optimizer._patch_step_function
        step = step.__wrapped__
    step(optimizer)


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has hooks from ``register_step_pre_hook``."""
    return bool(optimizer._optimizer_step_pre_hooks)


def has_amx() -> bool:
    """Return whether this CPU has AMX, which multiplies bfloat16 matrices in tiles."""
    return bool(torch.cpu._is_amx_tile_supported())


def is_view_operation(operator: Any) -> bool:
    """Return whether the results of ``operator`` share memory with an argument, as the result of ``view`` does."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)


def draws(operator: torch._ops.OpOverload, args: Sequence[Any] | None = None, kwargs: Any = None) -> bool:
    """Return whether ``operator`` draws random numbers. With arguments, attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [each.name for each in operator._schema.arguments]
    if args is None or "dropout_p" not in names:
        return True
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    return bool(given.get("dropout_p", 0.0))


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors begin at the same address."""
    same_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return bool(same_storage and one.storage_offset() == other.storage_offset())


def with_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> nn.Module:
    """Return a shallow copy of ``module`` with the submodules ``children``."""
    copied = copy.copy(module)
    copied.__dict__.update(module.__dict__)  # the __getstate__ of the module may omit attributes
    copied._modules = dict(children)
    return copied


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the direct submodules of ``module`` by name, including duplicates and names whose value is None."""
    return dict(module._modules)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wrapped. If its submodules are compiled, return a copy in which no
    module is compiled."""
    original = getattr(module, "_orig_mod", None)
    module = module if original is None else original
    if not any(hasattr(each, "_orig_mod") for each in module.modules()):
        return module
    children = {name: None if each is None else uncompiled(each) for name, each in module._modules.items()}
    return with_children(module, children)


@contextmanager
def called_eagerly(module: nn.Module) -> Iterator[None]:
    """Return a context in which ``module`` and its submodules ignore the compilation by ``nn.Module.compile``."""
    compiled = {part: part._compiled_call_impl for part in module.modules() if part._compiled_call_impl is not None}
    for part in compiled:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in compiled.items():
            part._compiled_call_impl = call


def hide_cpp_warnings() -> None:
    """Hide the warnings of torch's C++ code, unless an environment variable of torch requests them.

    If a rank dies, torch prints ten to thirty C++ frames per connection on every other rank. torch reads
    ``TORCH_CPP_LOG_LEVEL`` only when it is imported, so this function sets the variable in which torch stores it.
    """
    requests = {"TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES"}
    if not requests.isdisjoint(os.environ):
        return
    for library in Path(torch.__file__).parent.glob("lib/libc10.*"):
        with suppress(OSError, ValueError):
            ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level").value = 2  # errors
