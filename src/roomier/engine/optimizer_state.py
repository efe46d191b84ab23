"""Optimizer states by parameter name, independent of the order and the sharding of the parameters.

To check the states in a checkpoint for an optimizer of torch or roomier, a temporary optimizer of the same class takes
one step with the stored settings, on a parameter on the meta device. This step accepts or rejects the settings and
shows which states the class requires. For other optimizers, only the structure of the values is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import CheckpointError
from roomier.core.forms import FormError, anything, fields, item_of, like, tensor
from roomier.core.sharded import local_part, with_local_part
from roomier.core.tree import map_tensors, to_device

Spec = Any
"""Shape and dtype of a stored tensor."""


@runtime_checkable
class PlacesStates(Protocol):
    """Optimizer whose states are sharded differently from its parameters."""

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor for the state ``name`` of a parameter, or None if this rank does not need this
        state."""


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the fully qualified name of each parameter. A tied parameter is listed under the first of its names."""
    return {parameter: name for name, parameter in module.named_parameters()}


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
    now = [[named[index] for index in group["params"]] for group in optimizer.state_dict()["param_groups"]]
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
    its shards. :func:`_is_by_rows` and :class:`PlacesStates` describe other sharded states. All other states are
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
        return _empty(parameter, spec.shape, spec.dtype, is_sharded=is_sharded, on_meta=parameter in away)

    def places_of(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: map_tensors(lambda spec: place(parameters[name], key, spec), value, is_leaf=is_spec)  # noqa: B023 - called immediately
            for key, value in state.items()
        }

    return {**saved, "state": {name: places_of(name, state) for name, state in saved["state"].items()}}


def _is_by_rows(optimizer: Optimizer, key: str, shape: Sequence[int], parameter: Tensor) -> bool:
    """Return whether a state is sharded by the rows of its parameter, although its shape differs. The attribute
    ``row_states`` of an optimizer names such states. If the number of rows differs, as in the column means of a matrix,
    the state is replicated on every rank."""
    return key in getattr(optimizer, "row_states", ()) and tuple(shape[:1]) == tuple(parameter.shape[:1])


def _empty(
    parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, *, is_sharded: bool, on_meta: bool
) -> Tensor:
    size, own = shape, local_part(parameter)
    if is_sharded and own is not parameter:
        size = tuple(own.shape) if shape == tuple(parameter.shape) else (len(own), *shape[1:])
    part = torch.empty(size, dtype=dtype, device="meta" if on_meta else parameter.device)
    return with_local_part(parameter, part, shape, is_replicated=not is_sharded)


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
    counts_on_device = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    on_device = {id(p) for group in counts_on_device for p in group["params"]}
    optimizer.state.clear()
    for index, state in packed["state"].items():
        parameter = parameters[index]
        # torch stores step counts on the host unless the kernel reads the counts on the device.
        count_device = parameter.device if id(parameter) in on_device else torch.device("cpu")
        device = None if parameter in away else parameter.device
        optimizer.state[parameter] = own = {}
        for key, value in state.items():
            target = count_device if key == "step" else device
            placed = value if target is None else to_device(value, target)
            by_rows = _is_by_rows(optimizer, key, getattr(value, "shape", ()), parameter)
            cut = shard_like(parameter, placed, by_rows=by_rows)
            # The shard is a view of the full tensor and would prevent the full tensor from being freed.
            own[key] = placed if cut is placed else cut.clone()


def _names_by_index(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[int, str]:
    # state_dict() numbers parameters in the order of the groups.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {index: names.get(p, f"<parameter {index} outside the module>") for index, p in enumerate(parameters)}


_KNOWN = ("torch.optim", "roomier.techniques.optim")
_OF_KERNELS = ("params", "fused", "foreach", "capturable")  # settings that do not affect which states exist

States = dict[str, Any]


def check_values(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[nn.Parameter, str], place: str) -> None:
    """Check the settings and the states in ``saved``. The values of the tensors do not have to be read yet.

    Args:
        optimizer: the optimizer of this run.
        saved: state of an optimizer of the same class, with the same groups of parameters.
        names: the fully qualified name of each parameter.
        place: location of ``saved`` in the checkpoint, for error messages.

    Raises:
        FormError: a value is malformed.
    """
    for index, (group, stored) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        of_group = f"{place}.param_groups[{index}]"
        _check_settings(group, stored, of_group)
        expected: dict[tuple[Any, ...], States | None] = {}
        for parameter in group["params"]:
            state = saved["state"].get(names.get(parameter))
            if not state:
                continue
            kind = tuple(parameter.shape), parameter.dtype
            if kind not in expected:
                expected[kind] = _states_needed(optimizer, group, stored, parameter, of_group)
            _check_states(state, expected[kind], item_of(f"{place}.state", names[parameter]))


def _check_settings(group: Mapping[str, Any], stored: Mapping[str, Any], place: str) -> None:
    own = {key: like(value) for key, value in group.items() if key != "params"}
    required = {"lr": own["lr"]} if "lr" in own else {}
    fields(required, others=anything)(stored, place)
    for key in own.keys() & stored.keys():
        own[key](stored[key], item_of(place, key))
    if stored.get("capturable") and any(parameter.device.type == "cpu" for parameter in group["params"]):
        raise FormError(f"{place}.capturable", stored["capturable"], "false for parameters on the CPU")


def _states_needed(
    optimizer: Optimizer, group: Mapping[str, Any], stored: Mapping[str, Any], parameter: nn.Parameter, place: str
) -> States | None:
    """Return the states that ``optimizer`` has for ``parameter`` after a step, or None if these states cannot be
    determined.

    Raises:
        FormError: a step succeeds with the settings of ``group``, but fails with the settings of ``stored``.
    """
    make = type(optimizer)
    # optimizers whose states can change during training
    if not make.__module__.startswith(_KNOWN) or hasattr(make, "place"):
        return None
    try:
        states = _states_after_step(make, group, parameter)
    except Exception:  # the step requires more than a parameter, such as a process group or a closure
        return None
    settings = {**group, **stored}
    plain = (bool, int, float, str, tuple)
    if not all(
        settings[key] is value
        or (type(settings[key]) is type(value) and isinstance(value, plain) and settings[key] == value)
        for key, value in group.items()
    ):
        try:
            states = _states_after_step(make, settings, parameter)
        except Exception as error:  # the step can raise any error
            shown = {key: value for key, value in stored.items() if key not in _OF_KERNELS}
            raise FormError(place, shown, f"settings of {make.__name__} ({error})") from error
    return states


def _states_after_step(make: Callable[..., Any], settings: Mapping[str, Any], parameter: nn.Parameter) -> States:
    copy = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    copy.grad = torch.empty_like(copy)
    values = {key: _value_of(value) for key, value in settings.items() if key not in _OF_KERNELS}
    arguments = {key: values.pop(key) for key in values.keys() & inspect.signature(make).parameters.keys()}
    optimizer = make([{"params": [copy], **values}], **arguments)
    optimizer.step()
    return dict(optimizer.state[copy])


def _value_of(value: Any) -> Any:
    is_described = not isinstance(value, Tensor) and hasattr(value, "dtype")
    return torch.ones(value.shape, dtype=value.dtype) if is_described else value


def _check_states(state: Mapping[str, Any], expected: States | None, place: str) -> None:
    for key, own in (expected or {}).items():
        if key not in state:
            raise FormError(place, sorted(state), f"a mapping with the key {key!r}")
        form = tensor(shape=tuple(own.shape)) if isinstance(own, Tensor) else like(own)
        form(state[key], item_of(place, key))
