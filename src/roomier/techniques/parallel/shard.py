"""ZeRO with ``fully_shard``: grouping of parameters into units, and the dtype and timing of each collective.

[Note: the stages are two choices]
ZeRO (Rajbhandari et al. 2020, section 5) shards optimizer states (stage 1), gradients (stage 2) and parameters
(stage 3) across ranks. With ``fully_shard``, a stage is the combination of two choices:

- *When gradients are reduced*: once per optimizer step (stage 1), or after every micro-batch (stages 2 and 3).
- *When unsharded parameters are freed*: after the backward pass (stages 1 and 2), or after the forward pass of each
  block (stage 3). In stage 3, backward runs another all-gather.

[Note: units]
A unit is a set of parameters that one collective all-gathers. Blocks and large layers outside the blocks (an embedding,
the output layer) are units, unless they share a tensor with other modules. All remaining parameters belong to the root
unit, which stays unsharded during the step.

[Note: two dtypes in mixed precision]
Autocast computes matrix products and convolutions in 16 bits, and embeddings, norms and additions in float32, whereas
``MixedPrecisionPolicy`` alone would cast all parameters of a unit to 16 bits. To match autocast on a single device, the
weights of matrix products are all-gathered in 16 bits, and the embeddings and norms of the block are a separate unit,
which is all-gathered in float32. The hooks and collectives of each unit have a fixed cost, so embeddings and norms that
are only a small fraction of the block belong to the root unit instead.

[Note: parameters without a dimension]
A learned scalar, such as the temperature of CLIP, has no dimension that could be sharded, and sharding would save no
memory. It is therefore excluded from ``fully_shard`` and remains an ordinary parameter, which each rank updates. This
module sums the gradient of each learned scalar over the ranks once per step, as DDP does. DTensor treats tensors
without a dimension as replicated, so optimizers accept sharded and unsharded parameters in one list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from roomier.api.blocks import num_elements_of
from roomier.core import torch_fake, torch_private
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.mesh import REPLICATE, SHARD
from roomier.core.tree import map_tensors, tensors
from roomier.techniques.parallel.collectives import PairwiseAllGather, PairwiseReduceScatter, Reductions
from roomier.techniques.parallel.order import Order
from roomier.techniques.parallel.parallel import Parallel, StepRunner
from roomier.techniques.parallel.read_weights import layers_read_by_others

MULTIPLYING = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
# These modules read the weights of submodules in forward without calling the submodules. A submodule that is not called
# runs no forward pre-hook, so it must not become a separate unit.
READING_PARTS = (nn.MultiheadAttention,)
_LARGE = 0.02  # fraction of the model's parameters above which a layer outside the blocks becomes a unit
_FEW = 0.002  # fraction of a block's parameters up to which its layers in float32 belong to the root


@dataclass(frozen=True)
class Sharding:
    """Settings that determine how a model is sharded.

    Args:
        mesh: device mesh from :func:`roomier.techniques.parallel.mesh.make_mesh`.
        frees_parameters: if True, reshard the parameters of each unit after its forward pass (ZeRO-3).
        reduces_each_micro_batch: if True, reduce-scatter gradients after every micro-batch (ZeRO-2 and ZeRO-3).
        compute_dtype: autocast dtype; None if autocast is disabled.
        wire_dtype: dtype in which gradients are sent. None means the reduction dtype (float32, or float64 for a float64
            model), with one exception. If gradients are reduced after every micro-batch, the pairwise collectives use
            ``compute_dtype`` for the gradients of units that are all-gathered in ``compute_dtype``.
        finds_unused: if True, allow steps in which only some ranks use a parameter. A rank without a gradient
            contributes zeros. If no rank has a gradient, the parameter has no gradient.
        by_hand: whether the module uses manual optimization, in which backward and update run inside ``training_step``.
            If so, gradients are averaged over the ranks instead of summed.
        is_pairwise: if True, use the point-to-point collectives of :mod:`roomier.techniques.parallel.collectives`.
        is_sequential: if True, do not start an all-gather before its unit is needed. Pairwise reductions complete
            before the backward pass continues.
    """

    mesh: DeviceMesh
    frees_parameters: bool
    reduces_each_micro_batch: bool
    compute_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    finds_unused: bool = False
    by_hand: bool = False
    is_pairwise: bool = True
    is_sequential: bool = False

    @property
    def has_copies(self) -> bool:
        """True if the mesh has several groups of ranks, and each group stores a sharded replica of the model (HSDP)."""
        return self.mesh.ndim > 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks of the mesh; None means all ranks of the run."""
        return None if self.has_copies else self.mesh.get_group()


class Shards(Parallel):
    """A network sharded across ranks, with the methods that the engine calls in each step.

    Args:
        network: the network.
        sharding: settings of the sharding.
        blocks: the blocks of the network.
        absent: parameters of other stages of a pipeline. A module with such a parameter is not a unit.

    Attributes:
        sharding: settings of the sharding.
        runner: module that runs a step. The forward pass of this module unshards the parameters that the step requires.
        loss_factor: 1, because gradients are summed over the ranks.
        allows_inference_mode: False, because buffers that an all-gather allocates in inference mode cannot be used in
            training.
        late_parameters: parameters that are not sharded; see [Note: parameters without a dimension].
        root_parameters: parameters inside units that are sharded with the root, not with their unit; see
            :func:`root_parameters_of`.
        units: the modules that are units, without the root, in the order of the network.
        gathers_ahead: whether the forward pass of a unit starts the all-gather of the next unit.
    """

    allows_inference_mode = False

    def __init__(
        self,
        network: nn.Module,
        sharding: Sharding,
        blocks: Sequence[nn.Module],
        absent: Set[nn.Parameter] = frozenset(),
    ) -> None:
        self.sharding, self._absent = sharding, absent
        whole = [each for each in network.parameters() if is_whole(each) and each not in absent]
        self._whole = WholeParameters(whole, sharding.group, sharding.mesh.size() if sharding.by_hand else 1)
        self.late_parameters = self._whole.parameters
        self._reductions = Reductions()
        self._was_gathered = False
        self._is_last = True
        self._parameters: list[nn.Parameter] | None = None  # sharded parameters, as registered between steps
        self.runner: nn.Module = StepRunner(network)
        # If some ranks may skip a layer, its forward pass must not start a collective. In this case, only blocks become
        # units, and all other layers belong to the root.
        units = closed_blocks(network, blocks) if sharding.finds_unused else units_of(network, blocks)
        units = [each for each in units if absent.isdisjoint(each.parameters())]
        # The root is sharded first, because it includes small layers from inside the units. Autocast casts the
        # parameters of the root that are weights of matrix products.
        in_root = root_parameters_of(units, sharding.compute_dtype)
        in_units = {each for unit in units for each in unit.parameters()} - in_root
        self._cuts: list[FSDPModule] = []  # one for each group of parameters; the root is the first
        root = self._cut([self.runner], None, in_units)
        self.root_parameters = [each for unit in units for each in unit.parameters() if isinstance(each, DTensor)]
        parts = [self._shard_unit(unit) for unit in units]
        replicas = sharding.mesh.get_group(REPLICATE) if sharding.has_copies else None
        self._order = Order(network, self._cuts, sharding.group, replicas, is_fixed=sharding.finds_unused)
        self.runner.register_forward_hook(lambda *_: self._order.end_forward())
        # In a fixed order, ranks that run a unit must not start its all-gather earlier than ranks that skip it.
        is_sequential = sharding.is_sequential or sharding.finds_unused
        self.gathers_ahead = sharding.is_pairwise and not is_sequential
        if self.gathers_ahead:
            # On a GPU, fully_shard runs all-gathers on a separate stream, so that they overlap with computation.
            # Without streams, the overlap requires explicit forward prefetching.
            for own_parts, following in pairwise([[root], *parts]):
                own_parts[-1].set_modules_to_forward_prefetch([*own_parts[:-1], *following])
        self.units = units
        self._units = [each for each in self.runner.modules() if isinstance(each, FSDPModule)]
        if is_sequential:
            # An explicit list replaces implicit prefetching. Prefetching an unsharded unit is a no-op.
            for unit in self._units:
                unit.set_modules_to_backward_prefetch([unit])

    def __deepcopy__(self, memo: object) -> Shards:
        return self  # an attribute of the network, whose copies for a trace are not sharded

    def begin_run(self) -> None:
        """Set whether each unit is resharded after its forward pass. Call this method after all forward methods have
        been wrapped.

        The ZeRO stage determines whether units are resharded. However, a unit stays unsharded if it contains a
        :class:`~roomier.core.wrapped_forward.WrappedForward` that reads weights after the forward pass.
        """
        for unit in self._units[1:]:  # the root stays unsharded
            parts = unit.modules()
            is_read = any(getattr(each.forward, "reads_weights_later", False) for each in parts)
            unit.set_reshard_after_forward(self.sharding.frees_parameters and not is_read, recurse=False)

    @property
    def trace(self) -> int:
        """Hash of the collectives that depend on the executed units; see :class:`Order`."""
        return self._order.trace

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Configure the collectives for the next micro-batch of a step, before its forward pass."""
        self._order.begin_forward()
        if is_first:
            self._whole.begin_step()
        is_pairwise = self.sharding.is_pairwise
        self._reductions.window += is_first and is_pairwise and self._may_gradients_come_later()
        self.set_last(is_last=is_last)
        if self.sharding.reduces_each_micro_batch:
            return
        if not self._was_gathered:
            # With deferred gradient reduction, torch 2.13 fails on a unit whose forward pass never ran. To avoid this
            # failure, each unit is unsharded once.
            self._was_gathered = True
            for unit in self._units:
                unit.unshard()
        if is_first:  # a step that a hook interrupted may have left unreduced gradients
            for unit in self._units:
                torch_private.forget_unreduced_gradients(unit)

    def set_last(self, *, is_last: bool) -> None:
        """Set whether the next backward pass is the last one of its step."""
        self._is_last = is_last
        if not self.sharding.reduces_each_micro_batch:
            root = self._units[0]
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)

    def _may_gradients_come_later(self) -> bool:
        # A gradient must be complete immediately if a user hook reads the gradient, or if fully_shard accumulates the
        # gradient into an existing .grad (as after zero_grad(set_to_none=False)).
        if self._parameters is None:
            self.release()
            self._parameters = sharded_parameters(self.runner)
        return all(each.grad is None and not torch_private.has_gradient_hooks(each) for each in self._parameters)

    def begin_backward(self) -> None:
        """Prepare for a backward pass."""
        self._order.begin_backward()
        self._whole.begin_backward()

    def end_backward(self) -> None:
        """Complete the pending reductions at the end of a backward pass."""
        self._reductions.finish_and_free()
        if self._is_last:
            if self.sharding.is_pairwise:
                self._order.end_step(self.sharding.mesh.get_group(SHARD))
            self._order.remove_unused()
            self._whole.end_step()
        self._gather_root_again()

    def end_update(self) -> None:
        """Reshard all units after an update of the parameters."""
        # A hook may have unsharded parameters between backward and update. These unsharded copies still have the old
        # values.
        self.release()
        self._gather_root_again()

    def _gather_root_again(self) -> None:
        # Backward reshards all units. With manual optimization, the training step continues after its backward pass or
        # its update, so it requires the unsharded root with the current values. Blocks are all-gathered in their
        # forward pass.
        if self.sharding.by_hand:
            self._units[0].reshard()
            self._units[0].unshard()

    def release(self) -> None:
        """Reshard all units, for example after an evaluation or before named parameters are accessed."""
        for unit in self._units:
            if torch_private.is_being_gathered(unit):  # prefetched, but its forward pass did not run
                unit.unshard()
            unit.reshard()

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        norm = super().join_norms({each: norm for each, norm in norms.items() if not isinstance(each, DTensor)})
        sharded: dict[Tensor, Tensor] = {each: norm for each, norm in norms.items() if isinstance(each, DTensor)}
        if sharded:
            square = super().join_norms(sharded).square()
            dist.all_reduce(square, group=self.sharding.mesh.get_group(-1))
            norm = torch.hypot(square.sqrt(), norm) if len(sharded) < len(norms) else square.sqrt()
        return norm

    def _shard_unit(self, unit: nn.Module) -> list[FSDPModule]:
        """Shard ``unit`` as one group of parameters, or as two groups with different dtypes (see :func:`parts_of`)."""
        needs_no_weights = type(unit) is nn.Embedding  # in backward (read before fully_shard changes the type)
        groups = parts_of(unit, self.sharding.compute_dtype)
        if self.sharding.finds_unused and len(groups) > 1:  # a step may skip some of the modules of a group
            groups = [([unit], None)]
        parts = [self._cut(modules, dtype) for modules, dtype in groups]
        if needs_no_weights and not self.sharding.finds_unused:
            parts[0].set_unshard_in_backward(False)
        return parts

    def _cut(
        self, modules: list[nn.Module], compute_dtype: torch.dtype | None, in_units: Iterable[nn.Parameter] = ()
    ) -> FSDPModule:
        """Apply ``fully_shard`` to ``modules`` as one unit that is all-gathered in ``compute_dtype``.

        A ``compute_dtype`` of None preserves the dtype of the parameters. The unit excludes ``in_units`` and parameters
        that are already sharded.
        """
        sharding = self.sharding
        sharded = {each for module in modules for each in module.parameters() if isinstance(each, DTensor)}
        own = [each for module in modules for each in sharded_parameters(module)]
        trained = [each for each in own if each.requires_grad] or own  # frozen parameters can be unfrozen later
        dtypes = {each.dtype for each in trained}
        sum_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        # Autocast casts the inputs. torch 2.15 changes the meaning of reduce_dtype=None, so reduce_dtype is always set.
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=sum_dtype if sharding.is_pairwise else (sharding.wire_dtype or sum_dtype),
            cast_forward_inputs=False,
        )
        is_root = isinstance(modules[0], StepRunner)
        frees = sharding.frees_parameters and not is_root  # the step requires the unsharded root until the step ends
        if not is_root:
            for each in modules:
                each.register_forward_hook(without_views)  # this hook runs before the hooks of fully_shard
        unit: FSDPModule = fully_shard(
            modules,
            mesh=sharding.mesh,
            reshard_after_forward=frees,
            mp_policy=policy,
            ignored_params={*self._whole.parameters, *self._absent, *sharded, *in_units} or None,
        )[0]
        number = len(self._cuts)
        self._cuts.append(unit)
        # Sum on every backend. The losses are weighted, so the sum is the gradient of the global batch.
        unit.set_force_sum_reduction_for_comms(True)
        if sharding.finds_unused:
            torch_private.reduce_missing_gradients_as_zeros(unit)
        unit.set_gradient_divide_factor(float(sharding.mesh.size()) if sharding.by_hand else 1.0)
        if sharding.is_pairwise:
            # The gradients of an individual micro-batch already have compute_dtype, so they are sent in this dtype.
            # The gradients are summed in full precision.
            sent = compute_dtype if sharding.reduces_each_micro_batch else None
            reduce_scatter = PairwiseReduceScatter(
                self._reductions,
                may_wait=dtypes <= {sum_dtype}
                and not sharding.has_copies
                and not sharding.by_hand
                and not sharding.is_sequential,
                wire_dtype=sharding.wire_dtype or sent,
                send_header=lambda group: self._order.reduce_scatter(number, group),
            )
            all_gather = PairwiseAllGather(lambda group: self._order.all_gather(number, group))
            unit.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
        return unit


def without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Return ``output`` with each view replaced by a tensor that is not a view.

    ``fully_shard`` unshards a unit for backward in a hook on the gradients of its outputs. An in-place operation on an
    output that is a view creates a new autograd node for the tensor, without this hook.
    """
    if not torch.is_grad_enabled() or not any(torch_private.is_view(each) for each in tensors(output)):
        return output
    # A linear layer does not save its output for backward, so the new tensor may share the memory of the output.
    may_share = isinstance(module, nn.Linear)
    return map_tensors(lambda each: torch_private.without_view(each, may_share=may_share), output)


def units_of(network: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that become units, which are the blocks and the large layers outside the blocks. The root is
    not included.

    No unit shares a parameter with a module outside the unit.
    """
    num_owners = _num_owners(network)
    closed = closed_blocks(network, blocks)
    in_blocks = {part for block in closed for part in block.modules()}
    readers = [each for each in network.modules() if isinstance(each, READING_PARTS)]
    read = {part for reader in readers for part in reader.modules() if part is not reader}
    read |= layers_read_by_others(network)
    num_elements = num_elements_of(network)
    alone = [
        each
        for each in network.modules()
        if each not in in_blocks | read
        and each is not network
        and (each in readers or not any(True for _ in each.children()))
        and sum(parameter.numel() for parameter in sharded_parameters(each)) > _LARGE * num_elements
        and _is_closed(each, num_owners)
    ]
    wanted = {*closed, *alone}
    return [each for each in network.modules() if each in wanted]


def closed_blocks(network: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with a module outside the block."""
    num_owners = _num_owners(network)
    return [block for block in blocks if _is_closed(block, num_owners)]


def _num_owners(network: nn.Module) -> Counter[nn.Parameter]:
    # A module that is registered twice is counted once.
    return Counter(each for module in network.modules() for each in sharded_parameters(module, recurse=False))


def parts_of(unit: nn.Module, compute_dtype: torch.dtype | None) -> list[tuple[list[nn.Module], torch.dtype | None]]:
    """Return the groups of modules of ``unit`` that are all-gathered together, each with its dtype.

    A dtype of None preserves the dtype of the parameters. If all parameters use the same dtype, the only group is the
    unit itself. Otherwise, the first group contains the leaf modules that compute in float32, and the second group
    contains the remaining parameters of the unit. If :func:`root_parameters_of` returns the parameters of the first
    group, this group does not exist. See [Note: two dtypes in mixed precision].
    """
    exact = _exact_leaves(unit)
    if compute_dtype is None or exact == [unit]:
        return [([unit], None)]
    has_group = exact and not root_parameters_of([unit], compute_dtype)
    return [*([(exact, None)] if has_group else []), ([unit], compute_dtype)]


def root_parameters_of(units: Iterable[nn.Module], compute_dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Return the parameters inside ``units`` that are computed in float32 and belong to the root because they are
    few."""
    found: set[nn.Parameter] = set()
    for unit in units if compute_dtype is not None else ():
        exact = {parameter for leaf in _exact_leaves(unit) for parameter in sharded_parameters(leaf)}
        if sum(each.numel() for each in exact) <= _FEW * sum(each.numel() for each in sharded_parameters(unit)):
            found |= exact
    return found


def _exact_leaves(unit: nn.Module) -> list[nn.Module]:
    leaves = [each for each in unit.modules() if not any(True for _ in each.children()) and sharded_parameters(each)]
    return [each for each in leaves if not isinstance(each, MULTIPLYING)]


def _is_closed(module: nn.Module, num_owners: Counter[nn.Parameter]) -> bool:
    own = _num_owners(module)
    return all(count == num_owners[parameter] for parameter, count in own.items())


def lay_out_by_rows(network: nn.Module) -> None:
    """Convert all parameters to contiguous tensors, in place, and print a notice if any parameter was not contiguous.

    ``fully_shard`` shards only contiguous tensors by rows. Parameters in ``channels_last`` or transposed memory formats
    are copied. The values of the parameters do not change.
    """
    found = {name: each for name, each in network.named_parameters() if not each.is_contiguous()}
    for parameter in found.values():
        parameter.data = parameter.data.contiguous()
    if found:
        notice(
            f"converted {next(iter(found))} and {len(found) - 1} other parameters to contiguous memory format for "
            "sharding. Their values are unchanged"
        )


def check_shardable(network: nn.Module) -> None:
    """Check that ``fully_shard`` can shard the trained parameters of ``network``.

    Raises:
        RoomierError: trained parameters are complex or have different dtypes.
    """
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and not is_whole(parameter):
            dtypes.setdefault(parameter.dtype, name)
    for dtype, name in dtypes.items():
        if dtype.is_complex:
            problem = f"has dtype {dtype}, but sharded gradients are reduced as real numbers"
            stored = "Store the parameter as real numbers (torch.view_as_real) and view it as complex in forward"
            raise RoomierError("model", name, problem, f"{stored}, or use strategy='ddp'")
    if len(dtypes) > 1:
        found = ", ".join(f"{name}: {dtype}" for dtype, name in dtypes.items())
        action = "Convert the model to one dtype, for example with model.float(), or use strategy='ddp'"
        raise RoomierError("model", found, "trained parameters must have the same dtype to be sharded", action)


def is_whole(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has no dimension. ``fully_shard`` cannot shard such a parameter."""
    return not parameter.dim()


def sharded_parameters(module: nn.Module, *, recurse: bool = True) -> list[nn.Parameter]:
    """Return the parameters of ``module`` that can be sharded."""
    return [each for each in module.parameters(recurse) if not is_whole(each)]


class WholeParameters:
    """The unsharded parameters of a network, with the methods that :class:`Shards` calls in each step.

    Args:
        parameters: all unsharded parameters, trained or frozen.
        group: process group of the ranks that store these parameters; None means all ranks.
        num_shares: number by which the sum of the gradients over the ranks is divided.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None, num_shares: int = 1
    ) -> None:
        self.parameters, self._group, self._num_shares = parameters, group, num_shares
        self._kept: dict[nn.Parameter, Tensor] | None = None

    def begin_step(self) -> None:
        """Discard the gradients that remain after an interrupted step."""
        self._kept = None

    def begin_backward(self) -> None:
        """Move existing gradients out of ``grad``, because they are already summed over the ranks."""
        if self._kept is not None:  # the first micro-batch already stored the gradients
            return
        self._kept = {}
        for each in self.parameters:
            if each.grad is not None:
                self._kept[each], each.grad = each.grad, None

    @torch.no_grad()
    def end_step(self) -> None:
        """Sum the gradients over the ranks. Call after the backward pass of the last micro-batch."""
        trained = sorted((each for each in self.parameters if each.requires_grad), key=_dtype_name)
        for _, group in groupby(trained, _dtype_name):
            self._add_up(list(group))
        for each, kept in (self._kept or {}).items():
            each.grad = kept if each.grad is None else kept.add_(each.grad)
        self._kept = None

    def _add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of ``parameters``, which have the same dtype, over all ranks.

        A gradient that is missing on some ranks counts as zero. A gradient that is missing on all ranks remains None.
        16-bit gradients are sent and summed in float32. The same collective also counts, for each gradient, the ranks
        that have it. Reading a count synchronizes with the device, so a rank reads only the counts of its missing
        gradients.
        """
        values = torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in parameters])
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        has_gradient = torch.ones_like(values)  # created on the device, because a copy from the host would synchronize
        for number, each in enumerate(parameters):
            if each.grad is None:
                has_gradient[number].zero_()
        together = torch.stack([values, has_gradient])
        dist.all_reduce(together, group=self._group)
        sums, num_with = together[0] / self._num_shares, together[1]
        for number, each in enumerate(parameters):
            if each.grad is not None:
                each.grad.copy_(sums[number])
            elif not torch_fake.is_fake([num_with]) and num_with[number]:
                each.grad = sums[number].to(each.dtype)


def _dtype_name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype)
