"""Optimizer states by parameter name, so that a checkpoint does not know the order or layout that wrote it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import CheckpointError
from roomier.core.tree import map_tensors, to_device

Spec = Any
"""Shape and dtype of a stored tensor."""


@runtime_checkable
class PlacesStates(Protocol):
    """An optimizer whose states are cut otherwise than its parameters."""

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """An empty tensor for the state ``name`` of a parameter; None where it is not needed."""
        ...


@runtime_checkable
class HasRowStates(Protocol):
    """An optimizer with states that are cut as the rows of their parameter are, and have another shape."""

    @property
    def row_states(self) -> Sequence[str]:
        """The names of these states; their first dimension is that of the parameter."""
        ...


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """The fully qualified name of each parameter; a tied one has the first of its names."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    return names


def optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """``{"type": class name, "state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}``; tensors are not
    copied."""
    packed = optimizer.state_dict()
    named = _names_by_index(optimizer, names)
    groups = [{**group, "params": [named[index] for index in group["params"]]} for group in packed["param_groups"]]
    state = {named[index]: state for index, state in packed["state"].items()}
    return {"type": type(optimizer).__name__, "state": state, "param_groups": groups}


def check_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
    """Check that ``saved``, whose tensors need not be read yet, is a state of ``optimizer``.

    Raises:
        CheckpointError: the optimizer is of another class, or has other parameters or groups than the saved one.
    """
    action = "Build the optimizer as in the run that was saved, or load the weights alone"
    if saved["type"] != type(optimizer).__name__:
        # Another one's states would be taken for its own: those of Adam fit AdamW by name, and it would not decay.
        raise CheckpointError(
            "optimizer", type(optimizer).__name__, f"the checkpoint holds the states of {saved['type']}", action
        )
    named = _names_by_index(optimizer, names)
    groups = optimizer.state_dict()["param_groups"]
    now = [[named[index] for index in group["params"]] for group in groups]
    then = [list(group["params"]) for group in saved["param_groups"]]
    if now != then:
        differing = sorted({name for group in now for name in group} ^ {name for group in then for name in group})
        raise CheckpointError(
            "optimizer",
            type(optimizer).__name__,
            f"its parameter groups are not those of the checkpoint (differing: {differing[:5] or 'their order'})",
            action,
        )


def state_places(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
    *,
    is_spec: Callable[[Any], bool],
    unneeded: Any,
) -> dict[str, Any]:
    """``saved`` with an empty tensor in the place of each that is to be read.

    A state of its parameter's shape, or of its rows, is cut like the parameter, so that no rank holds more of it than
    it trains with. Any other stands on the parameter's device, on every rank; one without dimensions, such as a step
    count, on the CPU, from where the engine puts it where the optimizer wants it.

    Args:
        is_spec: tells what stands for a tensor: it has ``shape`` and ``dtype``.
        unneeded: stands where the optimizer has no use for a tensor.
    """
    parameters = {name: parameter for parameter, name in names.items()}

    def place(parameter: nn.Parameter, key: str, spec: Spec) -> Any:
        if isinstance(optimizer, PlacesStates):
            tensor = optimizer.place(key, spec.shape, spec.dtype)
            return unneeded if tensor is None else tensor
        if not spec.shape:
            return torch.empty((), dtype=spec.dtype)
        is_cut = tuple(spec.shape) == tuple(parameter.shape) or key in _row_states(optimizer)
        return _empty_beside(parameter, spec.shape, spec.dtype, is_cut=is_cut)

    def places_of(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: map_tensors(lambda spec: place(parameters[name], key, spec), value, is_leaf=is_spec)  # noqa: B023 - called at once
            for key, value in state.items()
        }

    return {**saved, "state": {name: places_of(name, state) for name, state in saved["state"].items()}}


def _row_states(optimizer: Optimizer) -> Sequence[str]:
    return optimizer.row_states if isinstance(optimizer, HasRowStates) else ()


def _empty_beside(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, *, is_cut: bool) -> Tensor:
    if type(parameter) is not nn.Parameter:
        from torch.distributed.tensor import DTensor, Replicate, empty  # slow to import, and needed only here

        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements = parameter.placements if is_cut else [Replicate()] * mesh.ndim
            return empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def cut_like(own: Any, value: Any, *, by_rows: bool = False) -> Any:
    """``value``, the whole of a tensor, cut as ``own`` is, which has its shape, or its rows; anything else as it is. No
    rank waits for another."""
    is_whole = isinstance(value, Tensor) and isinstance(own, Tensor) and (by_rows or own.shape == value.shape)
    if not is_whole or type(own) in (Tensor, nn.Parameter):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import, and needed only here

    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
    """Put ``saved`` (from :func:`optimizer_state`) back.

    Raises:
        CheckpointError: as :func:`check_optimizer`.
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
        _load_as_saved(optimizer, packed)


def _load_as_saved(optimizer: Optimizer, packed: Mapping[str, Any]) -> None:
    # Optimizer.load_state_dict casts every state to the dtype of its parameter; an fp32 state of a bf16 weight
    # would lose its low bits, and a resume would not be exact.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    on_device = {id(p) for group in optimizer.param_groups for p in group["params"] if _counts_on_device(group)}
    row_states = _row_states(optimizer)
    optimizer.state.clear()
    for index, state in packed["state"].items():
        parameter = parameters[index]
        # torch keeps step counts on the host unless the kernel reads them on the device.
        count_device = parameter.device if id(parameter) in on_device else torch.device("cpu")
        optimizer.state[parameter] = {
            key: _owned(
                to_device(value, count_device if key == "step" else parameter.device),
                parameter,
                by_rows=key in row_states,
            )
            for key, value in state.items()
        }


def _owned(value: Any, parameter: nn.Parameter, *, by_rows: bool) -> Any:
    cut = cut_like(parameter, value, by_rows=by_rows)
    # A part of a whole would keep all of it in memory.
    return value if cut is value else cut.clone()


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _names_by_index(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[int, str]:
    # state_dict() numbers parameters in the order of the groups.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {index: names.get(p, f"<parameter {index} outside the module>") for index, p in enumerate(parameters)}
