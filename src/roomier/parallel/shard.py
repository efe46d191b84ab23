"""ZeRO with ``fully_shard``: which parameters travel together, in which dtype, and when.

[Note: the stages are two choices]
ZeRO (Rajbhandari et al. 2020, section 5) cuts optimizer states (1), gradients (2) and parameters (3) among the ranks.
On ``fully_shard`` these are *when gradients are reduced* (stage 1 once a step, 2 and 3 after each micro-batch) and
*when gathered parameters are freed* (stages 1 and 2 after the backward, 3 after each block, to be gathered again).

[Note: units]
A unit is gathered by one collective. Blocks are units, and so is what else is large and stands alone (an embedding, the
output layer); the rest, and whatever shares a tensor with it, belongs to the root, which stays gathered for the step.

[Note: two dtypes in mixed precision]
Under autocast, matrix products and convolutions compute in 16 bits, embeddings, norms and additions in float32. So what
is multiplied is gathered in 16 bits, and the embeddings and norms of a unit in float32, as a unit of their own: the
arithmetic of a sharded run is that of autocast on one device, where ``fully_shard`` alone would round all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from roomier.api.blocks import num_elements_of
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.tree import map_tensors, tensors
from roomier.parallel.collectives import PairwiseAllGather, PairwiseReduceScatter, Reductions
from roomier.parallel.norm import clip_grad_norm, clip_grad_value, over_ranks
from roomier.parallel.runner import StepRunner
from roomier.parallel.whole import WholeParameters, cut_parameters, is_whole

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
# Their forward reads the weights of parts that it does not call: nothing would gather those.
READING_PARTS = (nn.MultiheadAttention,)
_LARGE = 0.02  # of the model's parameters: what stands alone outside all blocks


@dataclass(frozen=True)
class Sharding:
    """How a model is cut.

    Args:
        mesh: from :func:`roomier.parallel.mesh.make_mesh`.
        frees_parameters: after the forward of each unit (ZeRO-3).
        reduces_each_micro_batch: gradients are cut at once (ZeRO-2 and 3).
        compute_dtype: of autocast; None for none.
        wire_dtype: in which gradients travel; None is the dtype they have where they are not added up before.
        finds_unused: a step may leave out parameters on some ranks only: what has no gradient on a rank counts as zero
            there, and everywhere if no rank has one.
        by_hand: backward and update run within a training step (manual optimization); gradients are then the mean over
            the ranks, not their sum.
        is_pairwise: parts travel by sends of our own, see :mod:`roomier.parallel.collectives`.
    """

    mesh: DeviceMesh
    frees_parameters: bool
    reduces_each_micro_batch: bool
    compute_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    finds_unused: bool = False
    by_hand: bool = False
    is_pairwise: bool = True

    @property
    def has_copies(self) -> bool:
        """Whether the model is there more than once, each copy cut among a group of ranks."""
        return self.mesh.ndim > 1


class Shards:
    """A network cut among the ranks: what the engine tells it at each step.

    Attributes:
        sharding: how it is cut.
        runner: calls steps, with the network gathered as far as they need it.
        loss_factor: 1, since gradients are added up.
        allows_inference_mode: memory that is first gathered into in inference mode can never be trained with.
        trace: a digest of the units whose forward was run, in their order. Collectives go by their order: a rank that
            runs other units gathers these with parts of others, which nothing else would notice.
        late_parameters: those that stay whole, see [Note: parameters without a dimension] in ``whole.py``.
    """

    loss_factor = 1.0
    allows_inference_mode = False

    def __init__(self, network: nn.Module, sharding: Sharding, blocks: Sequence[nn.Module]) -> None:
        self.sharding = sharding
        self._whole = WholeParameters(network, sharding.mesh.size() if sharding.by_hand else 1)
        self.late_parameters: Sequence[nn.Parameter] = self._whole.parameters
        self._reductions = Reductions()
        self._was_gathered = False
        self._is_last = True
        self._parameters: list[nn.Parameter] | None = None  # all of them, as they are between steps
        self.runner: nn.Module = StepRunner(network)
        self.trace = 0
        # A layer that some ranks leave out must not be gathered by its own forward: it belongs to the root.
        units = closed_blocks(network, blocks) if sharding.finds_unused else units_of(network, blocks)
        parts = [self._cut_unit(unit) for unit in units]
        for number, unit in enumerate(units, start=1):
            unit.register_forward_pre_hook(partial(self._note, number))
        # The rest is small: norms, positions, tied embeddings. Autocast itself casts what of it is multiplied.
        root = self._cut([self.runner], None)
        if sharding.is_pairwise:
            _gather_ahead([[root], *parts])
        self._units = [each for each in self.runner.modules() if isinstance(each, FSDPModule)]

    def begin_run(self) -> None:
        """Once what works inside the forwards of the network is in place: a unit is freed after its forward as the
        stage says, unless a :class:`~roomier.core.wrapped_forward.WrappedForward` in it reads its weights later."""
        for unit in self._units[1:]:  # the root stays
            parts = unit.modules()
            is_read = any(getattr(each.forward, "reads_weights_later", False) for each in parts)
            unit.set_reshard_after_forward(self.sharding.frees_parameters and not is_read, recurse=False)

    def _note(self, number: int, *_: Any) -> None:
        self.trace = (self.trace * 1_000_003 + number) % 2**31

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Before the forward of each micro-batch of a step."""
        self._is_last = is_last
        if is_first:
            self._whole.begin_step()
        is_pairwise = self.sharding.is_pairwise
        self._reductions.window += is_first and is_pairwise and self._may_gradients_come_later()
        if self.sharding.reduces_each_micro_batch:
            return
        if not self._was_gathered:
            # Where gradients wait for the last micro-batch, torch 2.13 fails on a unit that no forward ever gathered.
            self._was_gathered = True
            for unit in self._units:
                unit.unshard()
        if is_first:  # of a step that a hook broke off, some micro-batches may be there
            for unit in self._units:
                torch_private.forget_unreduced_gradients(unit)
        root = self._units[0]
        root.set_requires_gradient_sync(is_last)
        root.set_reshard_after_backward(is_last)

    def _may_gradients_come_later(self) -> bool:
        # fully_shard adds to a gradient that is there, as an optimizer leaves it whose zero_grad fills with zeros; and
        # hooks of users look at it.
        if self._parameters is None:
            self.release()
            self._parameters = cut_parameters(self.runner)
        return all(each.grad is None and not torch_private.has_gradient_hooks(each) for each in self._parameters)

    def begin_backward(self) -> None:
        """Before each backward."""
        self._whole.begin_backward()

    def end_backward(self) -> None:
        """After each backward."""
        self._reductions.finish()
        if self._is_last:
            self._whole.end_step()
        self._gather_root_again()

    def end_update(self) -> None:
        """After each update of the parameters."""
        # What a hook gathered between the backward and the update has the values of before.
        self.release()
        self._gather_root_again()

    def _gather_root_again(self) -> None:
        # A backward frees what is gathered. A training step that runs it by hand goes on and needs the root again, with
        # the values of the update; blocks are gathered at their forward.
        if self.sharding.by_hand:
            self._units[0].reshard()
            self._units[0].unshard()

    def release(self) -> None:
        """Free what is gathered: after an evaluation, and before parameters are looked at by name."""
        for unit in self._units:
            if torch_private.is_being_gathered(unit):  # ahead of a forward that did not come
                unit.unshard()
            unit.reshard()

    def trained_parameters_changed(self) -> None:
        """``fully_shard`` looks at it each time."""

    def clip_grad_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        return clip_grad_norm(parameters, max_norm)

    def clip_grad_value_(self, parameters: Sequence[Tensor], max_value: float) -> None:
        clip_grad_value(parameters, max_value)

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        of_cut = [norm for parameter, norm in norms.items() if isinstance(parameter, DTensor)]
        whole = [norm for parameter, norm in norms.items() if not isinstance(parameter, DTensor)]
        norm = torch_private.join_norms(whole)
        if of_cut:
            over_parts = over_ranks(torch_private.join_norms(of_cut), self.sharding.mesh.get_group(-1))
            norm = torch.hypot(over_parts, norm) if whole else over_parts
        return norm

    def _cut_unit(self, unit: nn.Module) -> list[FSDPModule]:
        """Cut ``unit``: as one, or what it multiplies with and the rest of it as two."""
        needs_no_weights = type(unit) is nn.Embedding  # for its backward; the class of what is cut changes
        parts = [self._cut(modules, dtype) for modules, dtype in parts_of(unit, self.sharding.compute_dtype)]
        if needs_no_weights:
            parts[0].set_unshard_in_backward(False)
        return parts

    def _cut(self, modules: list[nn.Module], compute_dtype: torch.dtype | None) -> FSDPModule:
        """Make ``modules`` one unit, gathered in ``compute_dtype`` (None: as they are)."""
        sharding = self.sharding
        dtypes = {each.dtype for module in modules for each in cut_parameters(module) if each.requires_grad}
        sum_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        # Inputs are left to autocast. torch 2.15 changes what reduce_dtype=None means, so it is always named.
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=sum_dtype if sharding.is_pairwise else (sharding.wire_dtype or sum_dtype),
            cast_forward_inputs=False,
        )
        is_root = isinstance(modules[0], StepRunner)
        frees = sharding.frees_parameters and not is_root  # the root is needed until the step ends
        if not is_root:
            for each in modules:
                each.register_forward_hook(without_views)  # before those of fully_shard: hooks run in their order
        unit: FSDPModule = fully_shard(
            modules,
            mesh=sharding.mesh,
            reshard_after_forward=frees,
            mp_policy=policy,
            ignored_params=set(self._whole.parameters) or None,
        )[0]
        # A sum, on every backend: the weights of the losses make it the gradient of the global batch.
        unit.set_force_sum_reduction_for_comms(True)
        if sharding.finds_unused:
            torch_private.reduce_missing_gradients_as_zeros(unit)
        unit.set_gradient_divide_factor(float(sharding.mesh.size()) if sharding.by_hand else 1.0)
        if sharding.is_pairwise:
            # Gradients that no earlier micro-batch was added to go out as they are; the sum is taken in full.
            own = compute_dtype if sharding.reduces_each_micro_batch else None
            reduce_scatter = PairwiseReduceScatter(
                self._reductions,
                may_wait=dtypes <= {sum_dtype} and not sharding.has_copies and not sharding.by_hand,
                wire_dtype=sharding.wire_dtype or own,
            )
            unit.set_custom_all_gather(PairwiseAllGather())  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
        return unit


def without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """``output`` with views replaced by tensors of their own.

    ``fully_shard`` gathers for the backward when a gradient comes to an output of a unit. An operation in place on one
    that is a view makes it a new node of the graph, which nothing waits at.
    """
    if not torch.is_grad_enabled() or not any(torch_private.is_view(each) for each in tensors(output)):
        return output
    # A linear layer does not keep its output for its backward, so that the memory may be shared.
    may_share = isinstance(module, nn.Linear)
    return map_tensors(lambda each: torch_private.without_view(each, may_share=may_share), output)


def _gather_ahead(units: list[list[FSDPModule]]) -> None:
    # On a GPU fully_shard itself gathers beside the computation; without streams it has to be told what comes next.
    for parts, following in pairwise(units):
        parts[-1].set_modules_to_forward_prefetch([*parts[:-1], *following])


def units_of(network: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """What is gathered by one collective each, except the root: the blocks, and what else is large and stands alone.

    None of them shares a parameter with what is outside it.
    """
    num_owners = _num_owners(network)
    closed = closed_blocks(network, blocks)
    in_blocks = {part for block in closed for part in block.modules()}
    readers = [each for each in network.modules() if isinstance(each, READING_PARTS)]
    read = {part for reader in readers for part in reader.modules() if part is not reader}
    num_elements = num_elements_of(network)
    alone = [
        each
        for each in network.modules()
        if each not in in_blocks | read
        and each is not network
        and (each in readers or not any(True for _ in each.children()))
        and sum(parameter.numel() for parameter in cut_parameters(each)) > _LARGE * num_elements
        and _is_closed(each, num_owners)
    ]
    wanted = {*closed, *alone}
    return [each for each in network.modules() if each in wanted]


def closed_blocks(network: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with a module outside them."""
    num_owners = _num_owners(network)
    return [block for block in blocks if _is_closed(block, num_owners)]


def _num_owners(network: nn.Module) -> Counter[nn.Parameter]:
    # A module that is registered twice is one module.
    return Counter(each for module in network.modules() for each in cut_parameters(module, recurse=False))


def parts_of(unit: nn.Module, compute_dtype: torch.dtype | None) -> list[tuple[list[nn.Module], torch.dtype | None]]:
    """The modules of ``unit`` that are gathered together, and in which dtype (None: as they are): all of it, or what it
    does not multiply with and the rest. See [Note: two dtypes in mixed precision]."""
    leaves = [each for each in unit.modules() if _is_leaf_with_parameters(each)]
    exact = [each for each in leaves if not isinstance(each, MULTIPLYING)]
    if compute_dtype is None or exact == [unit]:
        return [([unit], None)]
    return [*([(exact, None)] if exact else []), ([unit], compute_dtype)]


def _is_closed(module: nn.Module, num_owners: Counter[nn.Parameter]) -> bool:
    own = _num_owners(module)
    return all(count == num_owners[parameter] for parameter, count in own.items())


def _is_leaf_with_parameters(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and bool(cut_parameters(module))


def lay_out_by_rows(network: nn.Module) -> None:
    """Parameters that lie in memory in another order (``channels_last``, a transpose), of which ``fully_shard`` cannot
    cut rows, in the usual one, in place. Their values stay what they are."""
    found = {name: each for name, each in network.named_parameters() if not each.is_contiguous()}
    for parameter in found.values():
        parameter.data = parameter.data.contiguous()
    if found:
        notice(
            f"{next(iter(found))} and {len(found) - 1} other parameters lay in memory in another order (channels_last, "
            "a transpose); cut among ranks they are contiguous, with the values they had"
        )


def check_shardable(network: nn.Module) -> None:
    """Refuse what ``fully_shard`` cannot cut.

    Raises:
        RoomierError: parameters that are trained are complex, or of several dtypes.
    """
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and not is_whole(parameter):
            dtypes.setdefault(parameter.dtype, name)
    for dtype, name in dtypes.items():
        if dtype.is_complex:
            problem = f"is of {dtype}, and gradients that travel in parts are added up as real numbers"
            action = "Hold it as real numbers (torch.view_as_real) and view it as complex in the forward, or use "
            raise RoomierError("model", name, problem, action + "strategy='ddp'")
    if len(dtypes) > 1:
        found = ", ".join(f"{name}: {dtype}" for dtype, name in dtypes.items())
        action = "Convert the model to one dtype (model.float()), or use strategy='ddp'"
        raise RoomierError("model", found, "trained parameters that travel together must be of one dtype", action)
