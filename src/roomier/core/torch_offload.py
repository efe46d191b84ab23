"""Private names of torch for parameters that are moved off the device, checked with torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

exchanges_memory = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""True if the memory of two storages can be exchanged (since torch 2.12)."""


def exchange_memory(one: Tensor, other: Tensor) -> None:
    """Exchange the memory of the storages of two tensors. All views of the storages use the exchanged memory.

    The storages must have the same size, or one of them must be empty.
    """
    storage: Any = one.untyped_storage()
    storage._swap_data_ptr_(other.untyped_storage())


def saving_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the active hooks of ``torch.autograd.graph.saved_tensors_hooks``; None if no hooks are active."""
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


class Shard:
    """This rank's shard of a parameter that ``fully_shard`` shards.

    Args:
        fsdp_param: object of ``fully_shard`` for the parameter.
    """

    def __init__(self, fsdp_param: Any) -> None:
        self._fsdp_param = fsdp_param

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter."""
        parameter: nn.Parameter = self._fsdp_param.sharded_param
        return parameter

    @property
    def padded(self) -> Tensor:
        """Elements of the shard, padded to the size of the largest shard (1-dimensional)."""
        padded: Tensor = self._fsdp_param._sharded_param_data
        return padded

    def within(self, padded: Tensor) -> Tensor:
        """Return the shard without padding, as a view of ``padded``."""
        dim, local = self._fsdp_param.fsdp_placement.dim, self._local
        length = local.size(dim) if local.numel() else 0
        return padded.view(self._fsdp_param.padded_sharded_param_size).narrow(dim, 0, length)

    def place(self, padded: Tensor, local: Tensor) -> None:
        """Replace the data of the shard with ``padded``, and the data of the local tensor with ``local``.

        ``Module.state_dict`` calls the parameter's ``detach``. If ``local`` is in host memory, ``detach`` is replaced
        and returns a tensor with this local shard. ``DTensor.detach`` would raise an error, because it expects a shard
        on the device of the mesh.
        """
        self._fsdp_param._sharded_param_data = padded
        self._local.data = local
        parameter: Any = self.parameter
        parameter.__dict__.pop("detach", None)
        if local.device.type != parameter.device.type:
            parameter.detach = partial(with_part_on_host, parameter, local)

    @property
    def _local(self) -> Tensor:
        local: Tensor = self._fsdp_param.sharded_param._local_tensor
        return local


class ShardGroup:
    """Parameters that one all-gather of ``fully_shard`` unshards.

    Args:
        group: object of ``fully_shard`` for the parameters.

    Attributes:
        shards: this rank's shards.
        name: name of the module of the group.
    """

    def __init__(self, group: Any, name: str) -> None:
        self._group = group
        self.name = name
        self.shards = [Shard(each) for each in group.fsdp_params]
        group._reset_sharded_params = True  # otherwise, the first forward pass would copy padded shards to new memory

    def before_unshard(self, call: Callable[[], object]) -> None:
        """Call ``call`` before each all-gather, including the all-gathers that ``fully_shard`` prefetches.

        On an accelerator, ``call`` runs on the stream that copies the shards for the all-gather.
        """
        group = self._group
        unshard = group.unshard

        def unshard_after_call(async_op: bool = False) -> None:
            if group._all_gather_result is None and not group.is_unsharded:
                stream = _copying_stream(group, async_op)
                if stream is None:
                    call()
                else:
                    stream.wait_stream(torch.accelerator.current_stream(group.device))
                    with stream:
                        call()
            unshard(async_op)

        group.unshard = unshard_after_call

    def restore_unshard(self) -> None:
        """Revert :meth:`before_unshard`."""
        self._group.__dict__.pop("unshard", None)


def _copying_stream(group: Any, async_op: bool) -> Any:
    if group.device.type == "cpu" or not hasattr(group.comm_ctx, "all_gather_copy_in_stream"):
        return None  # there is no such stream on the CPU, or before the first forward pass
    copying, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    return copying


class Gathers:
    """All-gathers that ``fully_shard`` runs in a network. ``fully_shard`` copies shards on a separate stream. The
    separate stream waits for the compute stream only at the beginning of a forward pass.

    Args:
        network: the network, whose modules need not be sharded.
    """

    def __init__(self, network: nn.Module) -> None:
        self._groups = [group for group, _ in _groups_in(network)]

    def __bool__(self) -> bool:
        return bool(self._groups)

    def wait_for(self, stream: torch.Stream) -> None:
        """Make the subsequent all-gathers wait for the work that was submitted to ``stream``."""
        for context in {id(group.comm_ctx): group.comm_ctx for group in self._groups}.values():
            # This stream exists after the first forward pass.
            copying = getattr(context, "all_gather_copy_in_stream", None)
            if copying is not None:
                copying.wait_stream(stream)


def groups_of(network: nn.Module) -> list[ShardGroup]:
    """Return the groups of ``fully_shard`` in ``network``, in the order of their modules."""
    return [ShardGroup(group, name) for group, name in _groups_in(network)]


def _groups_in(network: nn.Module) -> list[tuple[Any, str]]:
    found: dict[int, tuple[Any, str]] = {}
    for name, module in network.named_modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if state_of is None:
            continue
        state = state_of()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        for group in groups:
            found.setdefault(id(group), (group, name))
    return list(found.values())


def with_part_on_host(tensor: Any, part: Tensor) -> Tensor:
    """Return a DTensor that is sharded like the DTensor ``tensor``, with the local shard ``part`` in host memory.

    ``DTensor.from_local`` would move ``part`` to the device of the mesh.
    """
    sharded: Tensor = type(tensor)(part, tensor._spec, requires_grad=False)
    return sharded
