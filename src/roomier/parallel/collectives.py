"""All-gather and reduce-scatter for ranks on gloo, overlapped with the computation.

Each rank sends each other rank the one shard that it needs. The collectives of gloo copy full-size buffers: 8 Mi floats
on two ranks over loopback take 30 ms to gather and 40 ms to reduce there, 10 and 11 ms here (2 cores, torch 2.13). On a
CPU ``fully_shard`` has no streams, so it waits for an all-gather when it needs the parameters, and for a reduction when
the next reduction begins or the backward is over.

[Note: no flat buffers]
``fully_shard`` copies shards into a flat buffer, all-gathers it, and copies the parameters out of the result. It
copies gradients into a flat buffer and reduce-scatters it. Each copy reads and writes the whole unit. Dimension 0 is
sharded, so the shard of a rank is contiguous in a parameter and in its gradient. So large shards are received directly into the
unsharded parameters, and sent directly from the gradients. Small tensors still share one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # registers the operators torch.ops.fsdp
from torch import Tensor

from roomier.core import torch_private
from roomier.core.errors import TrainingError

PATIENCE = timedelta(minutes=15)  # longer than hang_timeout by default, whose error names the late rank
LARGE_BYTES = 2**18  # of a shard: from here on a message of its own takes less time than a copy


class Pieces(Tensor):
    """Replaces a flat buffer of ``fully_shard``: it keeps the tensors that would be copied into the buffer.

    Attributes:
        tensors: the tensors that would be copied into the buffer.
        copy_out: called with the tensors that would be filled from the buffer.
    """

    tensors: list[Tensor]
    copy_out: Callable[[Sequence[Tensor]], None] | None

    @classmethod
    def make(cls, dtype: torch.dtype, copy_out: Callable[[Sequence[Tensor]], None] | None = None) -> Pieces:
        with torch_private.without_interception():  # it is no tensor of the step
            made = torch.empty(0, dtype=dtype).as_subclass(cls)
        made.tensors, made.copy_out = [], copy_out
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operators = torch.ops.fsdp
        if func is operators.all_gather_copy_in:
            shards, pieces, *_ = args
            pieces.tensors = list(shards)
            return pieces, pieces
        if func is operators.chunk_cat:
            kwargs["out"].tensors = list(args[0])
            return None
        if func is operators.split_with_sizes_copy:
            args[0].copy_out(kwargs["out"])
            return None
        if func is Tensor.view:
            return args[0]
        if func is Tensor.div_:
            for each in args[0].tensors:
                each.div_(args[1])
            return args[0]
        if getattr(func, "__name__", "") != "__get__":  # reading dtype and device
            raise NotImplementedError(f"torch {torch.__version__} calls {func} on a buffer of fully_shard")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class PairwiseAllGather:
    """All-gather for :meth:`FSDPModule.set_custom_all_gather`, see [Note: no flat buffers].

    Args:
        casts: shards are cast before they are sent, so they are temporary.
    """

    def __init__(self, *, casts: bool = False) -> None:
        self._casts = casts
        self._wholes: list[Tensor] = []  # the unsharded parameters [ranks, elements of a shard], once they exist
        self._is_unused = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return Pieces.make(dtype, self._copy_out)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        if isinstance(output_tensor, Pieces):
            shards, output_tensor.tensors = output_tensor.tensors, []
            self._is_unused = True
            return _Gathering(shards, self._allocate(shards, group.size()), group, casts=self._casts)
        return _Gathering([input_tensor], [output_tensor.view(group.size(), -1)], group, casts=True)

    def free_unused(self) -> None:
        """Free what was gathered ahead for a backward that did not come. Called after the backward."""
        if self._is_unused:
            self._is_unused = False
            for each in self._wholes:
                each.untyped_storage().resize_(0)

    def _allocate(self, shards: Sequence[Tensor], num_ranks: int) -> list[Tensor]:
        shapes = [(num_ranks, shard.numel()) for shard in shards]
        if [(*each.shape,) for each in self._wholes] != shapes:
            self._wholes = [torch.empty(shape, dtype=shards[0].dtype) for shape in shapes]
        for each in self._wholes:
            storage, num_bytes = each.untyped_storage(), each.numel() * each.itemsize
            if storage.nbytes() != num_bytes:  # fully_shard frees and allocates by resizing
                storage.resize_(num_bytes)
        return self._wholes

    def _copy_out(self, parameters: Sequence[Tensor]) -> None:
        self._is_unused = False
        for parameter, whole in zip(parameters, self._wholes, strict=True):
            if not torch_private.is_same_memory(parameter, whole):  # the first time
                parameter.copy_(whole)
        self._wholes = [each.data for each in parameters]  # data: autograd does not count what is written to it


class _Gathering(dist.Work):
    """An all-gather of ``shards`` into ``wholes`` ``[ranks, elements of the shard]`` that has begun."""

    def __init__(
        self, shards: Sequence[Tensor], wholes: Sequence[Tensor], group: dist.ProcessGroup, *, casts: bool
    ) -> None:
        super().__init__()
        rank = group.rank()
        small = [number for number, each in enumerate(shards) if _is_small(each)]
        sent, received = [], []
        self._own: list[tuple[Tensor, Tensor]] = []
        for number, (shard, whole) in enumerate(zip(shards, wholes, strict=True)):
            if number in small:
                continue
            own = whole[rank]
            if casts:
                if not torch_private.is_same_memory(own, shard):
                    own.copy_(shard)
                shard = own
            else:  # the shard exists anyway, and the memory of the copy is not touched before it is needed
                self._own.append((own, shard))
            sent.append([shard] * group.size())
            received.append(list(whole))
        self._packed: Tensor | None = None
        self._small = [wholes[number] for number in small]
        if small:
            packed = torch.cat([shards[number] for number in small])
            self._packed = packed.new_empty(group.size(), packed.numel())
            self._own.append((self._packed[rank], packed))
            sent.append([packed] * group.size())
            received.append(list(self._packed))
        self._work = exchange(sent, received, group)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        work, self._work = self._work, []
        wait_for(work)
        for own, shard in self._own:
            own.copy_(shard)
        if self._packed is not None:
            parts = self._packed.split([each.shape[1] for each in self._small], dim=1)
            for whole, part in zip(self._small, parts, strict=True):
                whole.copy_(part)
        self._own, self._packed = [], None
        return True


class Reductions:
    """The reductions of all units of a model that have begun and are not over yet.

    Attributes:
        window: number of the optimizer step that is running.
    """

    def __init__(self) -> None:
        self.window = 0
        self._running: list[Iterator[None]] = []

    def begin(self, reduction: Iterator[None]) -> None:
        """Run ``reduction``, an iterator over its stages, until it waits for the first time."""
        next(reduction)
        self._running.append(reduction)

    def advance(self) -> None:
        """Run each reduction to its next stage."""
        self._running = [each for each in self._running if next(each, _OVER) is not _OVER]

    def finish(self) -> None:
        """Run all reductions to their end."""
        while self._running:
            self.advance()


_OVER = object()


class PairwiseReduceScatter:
    """Reduce-scatter for :meth:`FSDPModule.set_custom_reduce_scatter`, see [Note: no flat buffers]. Gradients are
    sent in ``wire_dtype`` and added in the dtype of the result, in the order of the ranks.

    ``fully_shard`` makes gradients of the result without reading it, unless it adds them to the gradients of an earlier
    micro-batch or of an earlier use of the unit. So the first reduction of a unit in a step may end later.

    Args:
        reductions: shared by all units of a model.
        may_wait: whether ``fully_shard`` leaves each result as it is.
        wire_dtype: None sends gradients in the dtype they have.
        replicas: ranks that hold the same shard of other replicas. The result is summed over them as well.
    """

    def __init__(
        self,
        reductions: Reductions,
        *,
        may_wait: bool,
        wire_dtype: torch.dtype | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._reductions = reductions
        self._may_wait = may_wait
        self._wire_dtype = wire_dtype
        self._replicas = replicas
        self._num_sent = 0
        self._last_window = reductions.window

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # fully_shard asks for what is sent, and then for the smaller result.
        (num_elements,) = size
        is_result = 0 < num_elements < self._num_sent
        self._num_sent = 0 if is_result else num_elements
        if is_result:
            return torch.empty(num_elements, dtype=dtype, device=device)
        self._reductions.advance()  # first: it frees memory
        return Pieces.make(self._wire_dtype or dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM
        gradients = [input_tensor]
        if isinstance(input_tensor, Pieces):
            gradients, input_tensor.tensors = input_tensor.tensors, []
        self._reductions.begin(_reduce(gradients, output_tensor, group, input_tensor.dtype, self._replicas))
        if not self._may_wait or self._last_window == self._reductions.window:
            self._reductions.finish()
        self._last_window = self._reductions.window


def _reduce(
    gradients: list[Tensor],
    output: Tensor,
    group: dist.ProcessGroup,
    wire_dtype: torch.dtype,
    replicas: dist.ProcessGroup | None,
) -> Iterator[None]:
    """Sum this rank's shards of ``gradients`` over the ranks of ``group``, and over ``replicas``, into ``output``.

    Yields:
        When it begins to wait for other ranks.
    """
    num_ranks, rank = group.size(), group.rank()
    shards = output.split([-(-len(each) // num_ranks) * each[:1].numel() for each in gradients])
    small = [number for number, each in enumerate(shards) if _is_small(each)]
    sums = [
        _Sum([rows.flatten() for rows in _rows_of_ranks(gradient.to(wire_dtype), num_ranks)], shard, rank)
        for number, (gradient, shard) in enumerate(zip(gradients, shards, strict=True))
        if number not in small
    ]
    packed_sum: Tensor | None = None
    if small:
        few = [shards[number] for number in small]
        packed = torch.empty(num_ranks, sum(each.numel() for each in few), dtype=wire_dtype)
        torch.ops.fsdp.chunk_cat([gradients[number] for number in small], dim=0, num_chunks=num_ranks, out=packed)
        packed_sum = output.new_empty(packed.shape[1]) if sums else output
        sums.append(_Sum(list(packed), packed_sum, rank))
    gradients.clear()
    work = exchange([each.parts for each in sums], [each.terms for each in sums], group)
    yield
    wait_for(work)
    for each in sums:
        each.finish()
    sums.clear()
    if packed_sum is not None and packed_sum is not output:
        for shard, part in zip(few, packed_sum.split([each.numel() for each in few]), strict=True):
            shard.copy_(part)
    if replicas is not None:
        work = [dist.all_reduce(output, group=replicas, async_op=True)]
        yield
        wait_for(work)


class _Sum:
    """The sum over the ranks of one part of a gradient, into ``target``.

    Attributes:
        parts: of the gradient of this rank, one for each rank.
        terms: the part of this rank in the gradient of each rank.
    """

    def __init__(self, parts: list[Tensor], target: Tensor, rank: int) -> None:
        own = parts[rank]
        self.parts = parts
        self._target = target[: own.numel()]
        # The sum may begin with the part of either of the first two ranks: a + b is b + a. So one part of another rank
        # is received into the sum.
        self._first: int | None = (1 if rank == 0 else 0) if target.dtype == own.dtype else None
        self.terms = [
            own if each == rank else self._target if each == self._first else torch.empty_like(own)
            for each in range(len(parts))
        ]

    def finish(self) -> None:
        """Add the terms, in the order of the ranks."""
        if self._first is None:
            self._target.copy_(self.terms[0])
        for number, term in enumerate(self.terms):
            if number != (self._first or 0):
                self._target.add_(term)


def _rows_of_ranks(gradient: Tensor, num_ranks: int) -> list[Tensor]:
    """The rows of each rank, as ``fully_shard`` divides them: the last ranks may have fewer, or none."""
    size = -(-len(gradient) // num_ranks)
    return [gradient[number * size : (number + 1) * size] for number in range(num_ranks)]


def _is_small(shard: Tensor) -> bool:
    return shard.numel() * shard.itemsize < LARGE_BYTES


def exchange(
    sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begin to send all ``sent[...][i]`` to rank i of ``group`` and to receive all ``received[...][i]`` from it, for
    every other rank."""
    work: list[dist.Work | None] = []
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        for ours, theirs in zip(sent, received, strict=True):
            if ours[peer].numel():
                work.append(dist.isend(ours[peer], group=group, group_dst=peer))
            if theirs[peer].numel():
                work.append(dist.irecv(theirs[peer], group=group, group_src=peer))
    return [each for each in work if each is not None]


def wait_for(work: Sequence[dist.Work]) -> None:
    """Wait until all of ``work`` is done.

    Raises:
        TrainingError: another rank did not send its part within ``PATIENCE``.
    """
    try:
        for each in work:
            each.wait(PATIENCE)
    except RuntimeError as error:
        # The second is what gloo says to all that comes after the first, as where an evaluation frees what it gathered.
        if not any(told in str(error).lower() for told in ("timed out", "timeout caused pair closure")):
            raise
        raise TrainingError(
            "strategy",
            f"rank {dist.get_rank()}",
            f"waited {PATIENCE} for a part that another rank did not send: it is stuck, or it left out a layer",
            "See what the other ranks do; where steps leave out layers, set find_unused_parameters in the strategy",
        ) from error
