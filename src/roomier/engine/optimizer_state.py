"""Optimizer states by parameter name, independent of the order and the sharding of the parameters."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import CheckpointError
from roomier.core.sharded import local_part
from roomier.core.tree import map_tensors, to_device

Spec = Any
"""Shape and dtype of a stored tensor."""


@runtime_checkable
class PlacesStates(Protocol):
    """Optimizer whose states are sharded differently from its parameters."""

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor for the state ``name`` of a parameter, or None if this rank does not need this
        state."""
        ...


@runtime_checkable
class HasRowStates(Protocol):
    """Optimizer with states that are sharded by the rows of their parameter, although their shape differs from the
    shape of the parameter. A state with a different number of rows, such as the column means of a matrix, is replicated
    on every rank."""

    @property
    def row_states(self) -> Sequence[str]:
        """Names of states that are sharded if their number of rows equals the number of rows of the parameter."""
        ...


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the fully qualified name of each parameter. A tied parameter is listed under the first of its names."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    return names


def optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """Return the state of ``optimizer`` with parameter names instead of indices. Tensors are not copied.

    Returns:
        ``{"type": class name, "state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}``.
    """
    packed = optimizer.state_dict()
    named = _names_by_index(optimizer, names)
    groups = [{**group, "params": [named[index] for index in group["params"]]} for group in packed["param_groups"]]
    state = {named[index]: state for index, state in packed["state"].items()}
    return {"type": type(optimizer).__name__, "state": state, "param_groups": groups}


def check_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
    """Check that ``saved`` is a state of ``optimizer``. The values of the tensors in ``saved`` do not have to be read
    yet.

    Raises:
        CheckpointError: ``saved`` belongs to a different optimizer class, or to different parameters or groups.
    """
    action = "Create the optimizer as in the saved run, or load only the weights"
    if saved["type"] != type(optimizer).__name__:
        # States of a different class could be accepted: the states of Adam and AdamW have the same names, but only
        # AdamW applies decoupled weight decay.
        raise CheckpointError(
            "optimizer", type(optimizer).__name__, f"the checkpoint contains the states of {saved['type']}", action
        )
    named = _names_by_index(optimizer, names)
    groups = optimizer.state_dict()["param_groups"]
    now = [[named[index] for index in group["params"]] for group in groups]
    then = [list(group["params"]) for group in saved["param_groups"]]
    if now != then:
        differing = sorted({name for group in now for name in group} ^ {name for group in then for name in group})
        problem = f"its parameter groups differ from the checkpoint in {differing[:5] or 'their order'}"
        raise CheckpointError("optimizer", type(optimizer).__name__, problem, action)


def state_places(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
    *,
    is_spec: Callable[[Any], bool],
    unneeded: Any,
    away: Container[nn.Parameter] = (),
) -> dict[str, Any]:
    """Return ``saved`` with an empty tensor in place of each tensor that will be read.

    States that have the shape of their parameter are sharded like the parameter, so that no rank allocates more than
    its shards. :class:`HasRowStates` and :class:`PlacesStates` describe other sharded states. All other states are
    replicated, on the device of the parameter. States without dimensions, such as step counts, are on the CPU. The
    engine moves these states to the device that the optimizer requires.

    Args:
        saved: the state with specifications in place of tensors.
        names: the fully qualified name of each parameter.
        is_spec: function that returns whether a value is a specification, which has ``shape`` and ``dtype``.
        unneeded: value that replaces tensors that this rank does not need.
        away: parameters whose states are not on the device. The tensors for these states are on the meta device.
    """
    parameters = {name: parameter for parameter, name in names.items()}

    def place(parameter: nn.Parameter, key: str, spec: Spec) -> Any:
        if isinstance(optimizer, PlacesStates):
            tensor = optimizer.place(key, spec.shape, spec.dtype)
            return unneeded if tensor is None else tensor
        if not spec.shape:
            return torch.empty((), dtype=spec.dtype)
        is_sharded = tuple(spec.shape) == tuple(parameter.shape) or _is_by_rows(optimizer, key, spec.shape, parameter)
        empty = _empty_on_meta if parameter in away else _empty_state_of
        return empty(parameter, spec.shape, spec.dtype, is_sharded=is_sharded)

    def places_of(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: map_tensors(lambda spec: place(parameters[name], key, spec), value, is_leaf=is_spec)  # noqa: B023 - called immediately
            for key, value in state.items()
        }

    return {**saved, "state": {name: places_of(name, state) for name, state in saved["state"].items()}}


def _row_states(optimizer: Optimizer) -> Sequence[str]:
    return optimizer.row_states if isinstance(optimizer, HasRowStates) else ()


def _is_by_rows(optimizer: Optimizer, key: str, shape: Sequence[int], parameter: Tensor) -> bool:
    return key in _row_states(optimizer) and tuple(shape[:1]) == tuple(parameter.shape[:1])


def _empty_state_of(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, *, is_sharded: bool) -> Tensor:
    if type(parameter) is not nn.Parameter:
        from torch.distributed.tensor import DTensor, Replicate, empty  # slow to import, and only sharding needs it

        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements = parameter.placements if is_sharded else [Replicate()] * mesh.ndim
            return empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _empty_on_meta(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, *, is_sharded: bool) -> Tensor:
    own = local_part(parameter)
    if own is parameter:
        return torch.empty(shape, dtype=dtype, device="meta")
    from torch.distributed.tensor import DTensor, Replicate  # slow to import, and only sharding needs it

    assert isinstance(parameter, DTensor)
    mesh, full = parameter.device_mesh, torch.empty(shape, dtype=dtype, device="meta")
    if not is_sharded:
        return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = full.new_empty(own.shape if shape == tuple(parameter.shape) else (len(own), *shape[1:]))
    placements = parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def shard_like(own: Any, value: Any, *, by_rows: bool = False) -> Any:
    """Return ``value``, a full tensor, sharded like ``own`` if both have the same shape or ``by_rows`` is True. Other
    values are returned unchanged. The function does not communicate.
    """
    is_whole = isinstance(value, Tensor) and isinstance(own, Tensor) and (by_rows or own.shape == value.shape)
    if not is_whole or type(own) in (Tensor, nn.Parameter):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import, and only sharding needs it

    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def load_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
    away: Container[nn.Parameter] = (),
) -> None:
    """Load ``saved``, the result of :func:`optimizer_state`.

    Args:
        optimizer: optimizer that receives the state.
        saved: state to load.
        names: the fully qualified name of each parameter.
        away: parameters whose states are not moved. Other states are moved to the device of their parameter.

    Raises:
        CheckpointError: ``saved`` is not a state of ``optimizer``; see :func:`check_optimizer`.
    """
    check_optimizer(optimizer, saved, names)
    named = _names_by_index(optimizer, names)
    groups = optimizer.state_dict()["param_groups"]
    index_of = {name: index for index, name in named.items()}
    packed = {
        "state": {index_of[name]: state for name, state in saved["state"].items()},
        "param_groups": [
            {**group, "params": indices["params"]} for group, indices in zip(saved["param_groups"], groups, strict=True)
        ],
    }
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(packed)
    else:
        _load_as_saved(optimizer, packed, away)


def _load_as_saved(optimizer: Optimizer, packed: Mapping[str, Any], away: Container[nn.Parameter]) -> None:
    # Optimizer.load_state_dict casts every state to the dtype of its parameter. An fp32 state of a bf16 weight would
    # lose its low bits, and a resume would not be exact.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    on_device = {id(p) for group in optimizer.param_groups for p in group["params"] if _counts_on_device(group)}
    optimizer.state.clear()
    for index, state in packed["state"].items():
        parameter = parameters[index]
        # torch stores step counts on the host unless the kernel reads the counts on the device.
        count_device = parameter.device if id(parameter) in on_device else torch.device("cpu")
        device = None if parameter in away else parameter.device
        optimizer.state[parameter] = {
            key: _owned(
                _moved(value, count_device if key == "step" else device),
                parameter,
                by_rows=_is_by_rows(optimizer, key, getattr(value, "shape", ()), parameter),
            )
            for key, value in state.items()
        }


def _moved(value: Any, device: torch.device | None) -> Any:
    return value if device is None else to_device(value, device)


def _owned(value: Any, parameter: nn.Parameter, *, by_rows: bool) -> Any:
    cut = shard_like(parameter, value, by_rows=by_rows)
    # The shard is a view of the full tensor and would prevent the full tensor from being freed.
    return value if cut is value else cut.clone()


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _names_by_index(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[int, str]:
    # state_dict() numbers parameters in the order of the groups.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {index: names.get(p, f"<parameter {index} outside the module>") for index, p in enumerate(parameters)}
