"""1-bit Adam: Adam that sends its momentum as signs after the variance has stabilized.

[Note: 1-bit Adam]
Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (arXiv
2102.02888), Algorithm 1. For the first ``freeze_step`` steps, the algorithm is Adam on gradients that are averaged in
full precision. Afterwards, the variance ``v`` is frozen, and rank ``i``, whose local gradient is ``g_i``, sends only
the momentum, as signs ``C[.]``:

    m_i = beta1 * m + (1 - beta1) * g_i
    c_i = C[m_i + e_i];                  e_i = m_i + e_i - c_i         each rank, with its error e_i
    m = C[mean over ranks of c_i + s];   s = mean of c_i + s - m       the owner of each shard, with its error s
    x = x - lr * m / (sqrt(v) + eps)                                   each rank, with all shards of m

The paper leaves the following details open or defines them differently:

- Both moments have the bias correction of torch's Adam. ``v`` retains the correction of the step at which it was
  frozen, so updates are continuous.
- Weight decay is decoupled, as in AdamW.
- Each block has a scale, which is the mean of the absolute values in the block (see [Note: which scale]).
- A frozen variance is at least :data:`LEAST_VARIANCE` times the mean variance of its tensor. The code represents all
  elements of a block with the same absolute value, so without this lower bound, an element with a variance near zero
  (the row of a rare token) would make large steps because of the noise of its neighbors.

[Note: bytes per rank]
On N ranks, a parameter requires memory in addition to its fp32 weight (4 bytes) and gradient (4). Before the freeze,
this is 8/N for both moments of this rank's shard (the owner updates the weights of its shard, and all ranks gather
them), and one bucket of messages. After the freeze, it is 4 for ``e``, 4 for the frozen denominator (2 with
``rounds_variance``), 4/N for ``s``, 0.16 for ``m``, which is stored in compressed form, and 0.31 for messages within a
step. Each rank applies the full update, so weights, ``e`` and the denominator cannot be sharded: an all-gather of
sharded weights would cost more traffic than the signs save.

[Note: which scale]
A block of :data:`BLOCK` elements has one scale, the mean of its absolute values. For given signs, this scale minimizes
the squared error. The norm of the error never exceeds the norm of the block, so error feedback stays bounded
(Karimireddy et al. 2019, arXiv 1901.09847, lemma 8). Using the root mean square as the scale would preserve the norm,
but the squared error could be up to twice the squared norm of the block. Blocks never span two tensors, because the
values of norms, embeddings and large matrices differ in magnitude, so a shared scale would cause large errors.

[Note: shards]
A tensor of ``n`` elements is sharded across ``N`` ranks like ``Shard(0)`` of a DTensor, into shards of ``ceil(n / N)``
elements, of which the last can be shorter or empty. Row ``r`` contains shard ``r`` of every tensor: first the bits of
all tensors, then the scales of all tensors. In the code, a shard is padded to full blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roomier.core.errors import CheckpointError, PlanError
from roomier.core.exchange import Exchange, all_reduce_bytes
from roomier.core.log import notice
from roomier.core.sharded import is_sharded, local_part
from roomier.core.units import format_bytes
from roomier.techniques.optim.local import ShardOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


BLOCK = 128
_BITS_BYTES = BLOCK // 8
_SCALE_BYTES = 4
_PACK = 0x0102040810204080  # multiplying eight bytes of 0 or 1 by this number collects the bits in the highest byte


class Pieces:
    """Division of a tensor with ``numel`` elements into ``num_ranks`` shards of at most ``size`` elements."""

    def __init__(self, numel: int, num_ranks: int) -> None:
        self.numel, self.num_ranks = numel, num_ranks
        self.size = -(-numel // num_ranks)

    def slice_of(self, rank: int) -> slice:
        """Return the slice of the flat tensor that belongs to ``rank``."""
        return slice(min(rank * self.size, self.numel), min((rank + 1) * self.size, self.numel))

    def to_rows(self, flat: Tensor, rows: Tensor) -> None:
        """Copy ``flat`` (``[numel]``) to ``rows`` (``[num_ranks, size or more]``). Elements of ``rows`` after the end
        of a shard do not change."""
        num_full, rest = divmod(self.numel, self.size) if self.numel else (0, 0)
        rows[:num_full, : self.size].copy_(flat[: num_full * self.size].view(num_full, self.size))
        if rest:
            rows[num_full, :rest].copy_(flat[num_full * self.size :])

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the concatenated shards in ``rows`` as ``[numel]``."""
        return rows[:, : self.size].reshape(-1)[: self.numel]


class SignCode:
    """Codes of several tensors in rows of bytes, one row per rank.

    Args:
        numels: number of elements in each tensor.
        num_ranks: number of rows.
        device: device of the codes.

    Attributes:
        pieces: division of each tensor into shards.
        row_bytes: number of bytes per row.
    """

    def __init__(self, numels: Sequence[int], num_ranks: int, device: torch.device) -> None:
        self.num_ranks = num_ranks
        self.pieces = [Pieces(numel, num_ranks) for numel in numels]
        self._num_blocks = [-(-piece.size // BLOCK) for piece in self.pieces]
        self._first_block = [sum(self._num_blocks[:index]) for index in range(len(numels))]
        total = sum(self._num_blocks)
        self._scales_at = total * _BITS_BYTES
        self.row_bytes = total * (_BITS_BYTES + _SCALE_BYTES)
        self._device = device
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        self._signs = 1.0 - 2.0 * bits  # [256, 8]: the signs that each byte represents
        self._counts = [self._elements_by_block(index) for index in range(len(numels))]

    def empty(self) -> Tensor:
        """Return rows for codes (uint8 ``[num_ranks, row_bytes]``) that represent zeros: all scales are 0."""
        return torch.zeros(self.num_ranks, self.row_bytes, dtype=torch.uint8, device=self._device)

    def encode(self, index: int, flat: Tensor, rows: Tensor) -> Tensor:
        """Write the code of tensor ``index`` to ``rows``, and return the values (``[numel]``) that the code
        represents."""
        pieces, width = self.pieces[index], self._num_blocks[index] * BLOCK
        if pieces.numel == self.num_ranks * width:
            padded = flat.view(self.num_ranks, width)
        else:
            padded = flat.new_zeros(self.num_ranks, width)
            pieces.to_rows(flat, padded)
        return pieces.from_rows(self._encode(index, padded, rows, self._counts[index]))

    def encode_piece(self, index: int, piece: Tensor, row: Tensor, rank: int, *, takes_largest: bool = False) -> Tensor:
        """Write the code of ``piece``, the flat shard of ``rank``, to ``row``. Return a flat tensor with the values
        that the code represents.

        Args:
            takes_largest: if True, use the largest absolute value as scale, so decoded values are encoded again without
                error.
        """
        width = self._num_blocks[index] * BLOCK
        padded = F.pad(piece, (0, width - piece.numel()))[None]
        counts = self._counts[index]
        own = counts if isinstance(counts, int) else counts[rank : rank + 1]
        return self._encode(index, padded, row[None], None if takes_largest else own)[0, : piece.numel()]

    def decode(self, index: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return tensor ``index`` (``[numel]``) from ``rows``."""
        return self.pieces[index].from_rows(self._decode(index, rows, dtype))

    def decode_sources(self, index: int, rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        """Return the shard of ``rank`` from each source, as a tensor ``[len(rows), numel of the shard]`` with one row
        per source."""
        inside = self.pieces[index].slice_of(rank)
        return self._decode(index, rows, dtype)[:, : inside.stop - inside.start]

    def _encode(self, index: int, padded: Tensor, rows: Tensor, counts: int | Tensor | None) -> Tensor:
        blocks = padded.view(len(padded), -1, BLOCK)
        bits, scales = self._fields(index, rows)
        sizes = blocks.abs()
        scales.copy_(sizes.amax(-1) if counts is None else sizes.sum(-1) / counts)
        eights = torch.signbit(blocks).view(len(padded), -1).view(torch.int64)
        bits.copy_(eights.mul_(_PACK).bitwise_right_shift_(56))  # the cast preserves the lowest byte
        return torch.copysign(scales.to(blocks.dtype)[..., None], blocks).view_as(padded)

    def _decode(self, index: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        bits, scales = self._fields(index, rows)
        signs = F.embedding(bits.int(), self._signs.to(dtype))
        blocks = signs.view(len(rows), -1, BLOCK)
        return blocks.mul_(scales.to(dtype)[..., None]).view(len(rows), -1)

    def _fields(self, index: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        first, num_blocks = self._first_block[index], self._num_blocks[index]
        bits = rows[:, first * _BITS_BYTES : (first + num_blocks) * _BITS_BYTES]
        begin = self._scales_at + first * _SCALE_BYTES
        return bits, rows[:, begin : begin + num_blocks * _SCALE_BYTES].view(torch.float32)

    def _elements_by_block(self, index: int) -> int | Tensor:
        """Return the number of elements in each block, excluding padding, but at least 1. The result is a tensor
        ``[num_ranks, blocks]``, or one number if all blocks are full."""
        pieces, num_blocks = self.pieces[index], self._num_blocks[index]
        if pieces.numel == self.num_ranks * num_blocks * BLOCK:
            return BLOCK
        sizes = [part.stop - part.start for part in map(pieces.slice_of, range(self.num_ranks))]
        starts = torch.arange(num_blocks) * BLOCK
        counts = (torch.tensor(sizes)[:, None] - starts).clamp(1, BLOCK)
        return counts.to(self._device, torch.float32)


LEAST_VARIANCE = 0.01
DEFAULT_FREEZE = 0.2  # default of freeze_step, as a fraction of the steps in a run
_BUCKET_ELEMENTS = 2**23  # number of gradient elements that are averaged together before the freeze: 32 MiB in fp32


class OneBitAdam(ShardOptimizer):
    """Adam that sends one bit per parameter after its first ``freeze_step`` steps; see [Note: 1-bit Adam].

    The optimizer itself averages over all ranks of the default process group. Gradients must be local to each rank, and
    every rank must call :meth:`step` the same number of times.

    Args:
        params: as for any optimizer. All parameters must be on one device.
        lr: learning rate.
        betas: decay rates of the momentum and of the variance.
        eps: term added to the square root of the variance.
        weight_decay: decoupled weight decay, multiplied by ``lr`` in each step.
        freeze_step: number of initial steps in full precision. The paper uses 15 to 25 % of the steps, but does not
            freeze the variance before the learning rate has warmed up and the variance has stabilized.
        rounds_variance: True to store the frozen denominators in bfloat16, as with strategy ``"zero1"``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int = 1000,
        rounds_variance: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.freeze_step = freeze_step
        self._rounds_variance = rounds_variance
        self._exchange = Exchange()
        self._num_steps = 0
        self._mesh: DeviceMesh | None = None
        # Groups must not change after this line, because the momentum code is laid out for these parameters.
        self._entries = [(p, group) for group in self.param_groups for p in group["params"] if p.numel()]
        self._pieces = [Pieces(p.numel(), self._exchange.num_ranks) for p, _ in self._entries]
        self._code: SignCode | None = None
        self._momentum: Tensor | None = None  # the compressed m; None until the variance is frozen

    @property
    def is_frozen(self) -> bool:
        """True if the variance is frozen and the momentum is sent as signs."""
        return self._momentum is not None

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that this rank has sent; see [Note: bytes sent] in ``core/exchange.py``."""
        return self._exchange.bytes_sent

    def _update_all(self) -> None:
        if not self.is_frozen and self._num_steps >= self.freeze_step:
            self._freeze()
        self._num_steps += 1
        if self.is_frozen:
            self._step_compressed()
        else:
            for bucket in self._buckets():
                self._step_exact(bucket)

    # ---- in full precision ---------------------------------------------------------------------------------------

    def _buckets(self) -> Iterator[list[int]]:
        """Yield buckets: lists of the indices of parameters whose gradients are averaged together. The parameters of a
        bucket have the same dtype and a limited total size."""
        bucket: list[int] = []
        num_elements = 0
        for index, (parameter, _) in enumerate(self._entries):
            is_other = bool(bucket) and _state_dtype(parameter) != _state_dtype(self._entries[bucket[0]][0])
            if bucket and (is_other or num_elements + parameter.numel() > _BUCKET_ELEMENTS):
                yield bucket
                bucket, num_elements = [], 0
            bucket.append(index)
            num_elements += parameter.numel()
        if bucket:
            yield bucket

    def _step_exact(self, bucket: list[int]) -> None:
        """Run Adam on the parameters in ``bucket``. Each rank reduces the gradients of its shards and updates these
        shards. Then, all ranks gather the updated shards."""
        sizes = [self._pieces[index].size for index in bucket]
        example = self._entries[bucket[0]][0]
        num_ranks, rank = self._exchange.num_ranks, self._exchange.rank
        rows = torch.zeros(num_ranks, sum(sizes), dtype=_state_dtype(example), device=example.device)
        for index, part in zip(bucket, torch.split(rows, sizes, dim=1), strict=True):
            gradient = self._entries[index][0].grad
            if gradient is not None:
                self._pieces[index].to_rows(_flat(gradient), part)
        own = self._exchange.all_to_all(rows).sum(0).div_(num_ranks)
        for index, gradient, new in zip(bucket, torch.split(own, sizes), torch.split(rows[rank], sizes), strict=True):
            self._update_own(index, gradient, new)
        self._exchange.all_gather(rows)
        for index, part in zip(bucket, torch.split(rows, sizes, dim=1), strict=True):
            parameter = self._entries[index][0]
            parameter.copy_(self._pieces[index].from_rows(part).view_as(parameter))

    def _update_own(self, index: int, gradient: Tensor, new: Tensor) -> None:
        """Write the updated shard of parameter ``index`` to ``new``."""
        (parameter, group), inside = self._entries[index], self._pieces[index].slice_of(self._exchange.rank)
        size = inside.stop - inside.start
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient[:size]), torch.zeros_like(gradient[:size])
        gradient, new = gradient[:size], new[:size]
        new.copy_(_flat(parameter)[inside])
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**self._num_steps)).sqrt_()
        new.mul_(1 - group["lr"] * group["weight_decay"])
        new.addcdiv_(state["exp_avg"], root.add_(group["eps"]), value=-group["lr"] / (1 - beta1**self._num_steps))

    # ---- after the freeze ----------------------------------------------------------------------------------------

    def _freeze(self) -> None:
        """Convert the sharded moments to the states that :meth:`_step_compressed` uses. All ranks must call this method
        at the same step."""
        self._start_code()
        for index, (parameter, group) in enumerate(self._entries):
            state = self.state[parameter]
            variance = self._gather(index, state.pop("exp_avg_sq"))
            variance.clamp_(min=variance.mean() * LEAST_VARIANCE)
            correction = 1 - group["betas"][1] ** self._num_steps
            self._hold_denominator(parameter, variance.div_(correction).sqrt_().add_(group["eps"]))
            # The first compressed momentum starts from the exact momentum, which is stored in the error while the code
            # is 0.
            momentum = self._gather(index, state.pop("exp_avg"))
            state["server_error"] = torch.zeros_like(self._own(index, momentum))
            state["worker_error"] = momentum.mul_(group["betas"][0])
        self._report_frozen()

    def _start_code(self) -> None:
        numels = [parameter.numel() for parameter, _ in self._entries]
        self._code = SignCode(numels, self._exchange.num_ranks, self._entries[0][0].device)
        self._momentum = self._code.empty()

    def _hold_denominator(self, parameter: nn.Parameter, denominator: Tensor) -> None:
        dtype = torch.bfloat16 if self._rounds_variance else _state_dtype(parameter)
        self.state[parameter]["denominator"] = denominator.to(dtype)

    def _step_compressed(self) -> None:
        assert self._code is not None
        assert self._momentum is not None
        code, rank = self._code, self._exchange.rank
        sent = code.empty()
        for index, (parameter, group) in enumerate(self._entries):
            beta1, error = group["betas"][0], self.state[parameter]["worker_error"]
            error.add_(code.decode(index, self._momentum, error.dtype), alpha=beta1)
            if parameter.grad is not None:
                error.add_(_flat(parameter.grad), alpha=1 - beta1)
            error.sub_(code.encode(index, error, sent))
        received = self._exchange.all_to_all(sent)
        for index, (parameter, _) in enumerate(self._entries):
            error = self.state[parameter]["server_error"]
            error.add_(code.decode_sources(index, received, rank, error.dtype).mean(0))
            error.sub_(code.encode_piece(index, error, self._momentum[rank], rank))
        self._exchange.all_gather(self._momentum)
        for index, (parameter, group) in enumerate(self._entries):
            denominator = self.state[parameter]["denominator"]
            update = code.decode(index, self._momentum, _state_dtype(parameter)).div_(denominator)
            correction = 1 - group["betas"][0] ** self._num_steps
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(update.view_as(parameter), alpha=group["lr"] / correction)

    def _report_frozen(self) -> None:
        assert self._code is not None
        num_ranks = self._exchange.num_ranks
        if num_ranks == 1:
            return
        now = 2 * (num_ranks - 1) * self._code.row_bytes
        before = all_reduce_bytes(sum(4 * parameter.numel() for parameter, _ in self._entries), num_ranks)
        notice(
            f"onebit_adam: the variance is frozen after {self._num_steps} steps; each rank now sends "
            f"{format_bytes(now)} per step, {before / now:.1f} times less than with float32 ({format_bytes(before)})"
        )

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _own(self, index: int, flat: Tensor) -> Tensor:
        return flat[self._pieces[index].slice_of(self._exchange.rank)]

    def _gather(self, index: int, own: Tensor) -> Tensor:
        """All-gather ``own``, the shard of each rank, and return the unsharded tensor (``[numel]``, in new memory)."""
        pieces = self._pieces[index]
        rows = own.new_zeros(self._exchange.num_ranks, pieces.size)
        rows[self._exchange.rank, : len(own)] = own
        self._exchange.all_gather(rows)
        return pieces.from_rows(rows)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the parameter groups, and the states by parameter index. With several ranks, the states are DTensors
        that are sharded across the ranks.

        Before the freeze: ``exp_avg`` and ``exp_avg_sq``. After the freeze: ``exp_avg``, ``denominator``,
        ``server_error``, each ``[numel]``, and ``worker_error``, ``[num_ranks, numel]``, one row per rank. Existing
        tensors are not copied.
        """
        indices = self._indices()
        states = {}
        for index, (parameter, _) in enumerate(self._entries):
            state: dict[str, Any] = {"step": torch.tensor(float(self._num_steps))}
            for name, value in self._stored(index, parameter):
                rows = (self._exchange.num_ranks,) if name == "worker_error" else ()
                state[name] = self._as_shard(value, (*rows, parameter.numel()))
            states[indices[parameter]] = state
        groups = [{**group, "params": [indices[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": states if self._num_steps else {}, "param_groups": groups}

    def _stored(self, index: int, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shard of each tensor in :meth:`state_dict`."""
        state = self.state[parameter]
        if not self.is_frozen:
            yield from state.items()
            return
        assert self._code is not None
        assert self._momentum is not None
        rank = self._exchange.rank
        row = self._momentum[rank : rank + 1]
        yield "exp_avg", self._code.decode_sources(index, row, rank, _state_dtype(parameter))[0]
        yield "denominator", self._own(index, state["denominator"])
        yield "server_error", state["server_error"]
        yield "worker_error", state["worker_error"][None]

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an empty tensor into which a state of :meth:`state_dict` can be read. The tensor is sharded across the
        ranks."""
        if not shape:
            return torch.empty(shape, dtype=dtype)
        inside = Pieces(shape[0], self._exchange.num_ranks).slice_of(self._exchange.rank)
        device = self._entries[0][0].device
        return self._as_shard(torch.empty(inside.stop - inside.start, *shape[1:], dtype=dtype, device=device), shape)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Tensors can be unsharded or sharded. Every rank must call this method.

        If the number of ranks differs from the number in the checkpoint, errors of several ranks are merged, or some
        ranks start with a zero error. The mean of the errors over the ranks does not change.

        Raises:
            CheckpointError: the states of a parameter are missing.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.state.clear()
        self._code = self._momentum = None
        self._num_steps = 0
        states = state_dict["state"]
        if not states:
            return
        indices = self._indices()
        missing = [indices[parameter] for parameter, _ in self._entries if indices[parameter] not in states]
        if missing:
            action = "Load only the weights, or a checkpoint of the same model"
            raise CheckpointError("optimizer", missing[:5], "the checkpoint lacks states of these parameters", action)
        first = states[indices[self._entries[0][0]]]
        self._num_steps = int(first["step"])
        if "denominator" in first:
            self._start_code()
        for index, (parameter, group) in enumerate(self._entries):
            saved = {name: self._local(value) for name, value in states[indices[parameter]].items()}
            if self._momentum is None:
                self.state[parameter] = {name: saved[name].to(parameter.device) for name in ("exp_avg", "exp_avg_sq")}
            else:
                num_ranks_then = states[indices[parameter]]["worker_error"].shape[0]
                self._load_frozen(index, parameter, group["betas"][0], saved, num_ranks_then)
        if self._momentum is not None:
            self._exchange.all_gather(self._momentum)

    def _load_frozen(
        self, index: int, parameter: nn.Parameter, beta1: float, saved: Mapping[str, Tensor], num_ranks_then: int
    ) -> None:
        assert self._code is not None
        assert self._momentum is not None
        dtype, device = _state_dtype(parameter), parameter.device
        rank, num_ranks = self._exchange.rank, self._exchange.num_ranks
        momentum, error = (saved[name].to(device, dtype) for name in ("exp_avg", "server_error"))
        self._hold_denominator(parameter, self._gather(index, saved["denominator"].to(device, dtype)))
        # If the shards differ from the saved shards, the elements of a block no longer have the same absolute value.
        # Therefore, the rounding error of the new code is added to the error.
        row = self._momentum[rank]
        coded = self._code.encode_piece(index, momentum, row, rank, takes_largest=num_ranks == num_ranks_then)
        error = error.add(momentum - coded, alpha=beta1)
        rows = saved["worker_error"].to(device, dtype)
        worker_error = rows[0] if len(rows) == 1 else rows.sum(0)
        if num_ranks != num_ranks_then:
            worker_error = worker_error * (num_ranks / num_ranks_then)
        self.state[parameter].update(server_error=error, worker_error=worker_error)

    def _indices(self) -> dict[nn.Parameter, int]:
        return {p: index for index, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def _as_shard(self, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._exchange.num_ranks == 1:
            return local
        from torch.distributed.device_mesh import init_device_mesh  # slow import, which a single process does not need
        from torch.distributed.tensor import DTensor, Shard

        if self._mesh is None:
            self._mesh = init_device_mesh(local.device.type, (self._exchange.num_ranks,))
        stride = (shape[-1], 1) if len(shape) == 2 else (1,)
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _local(self, value: Tensor) -> Tensor:
        """Return this rank's shard of a stored tensor, without a reference to the other shards."""
        if is_sharded(value) or not value.dim() or self._exchange.num_ranks == 1:
            return local_part(value)
        return value[Pieces(len(value), self._exchange.num_ranks).slice_of(self._exchange.rank)].clone()


def onebit_options(
    options: Mapping[str, Any], num_steps: Callable[[], float], lr_warmup_steps: int, *, cuts: bool
) -> dict[str, Any]:
    """Return ``options`` together with the values that depend on the run.

    Args:
        options: options that the user specified.
        num_steps: function that returns the number of optimizer steps in the run, or infinity if the number is unknown.
        lr_warmup_steps: number of steps in the learning rate warm-up.
        cuts: True if the strategy is zero1.

    Raises:
        PlanError: ``freeze_step`` is invalid, or it is missing and the length of the run is unknown.
    """
    length, given = num_steps(), options.get("freeze_step")
    if given is None and length == float("inf"):
        action = "Set freeze_step to about a fifth of the run: optimizer={'name': 'onebit_adam', 'freeze_step': 1000}"
        raise PlanError(
            "optimizer.options.freeze_step", None, "is required if the length of the run is unknown", action
        )
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        action = "Set freeze_step to the number of steps in full precision, about a fifth of the run"
        raise PlanError("optimizer.options.freeze_step", given, "must be a positive integer", action)
    freeze_step: int = max(1, round(DEFAULT_FREEZE * length), lr_warmup_steps) if given is None else given
    if freeze_step >= length:
        notice(
            f"onebit_adam: no step is compressed, because the run has {length:.0f} steps, and freeze_step is "
            f"{freeze_step}"
        )
    elif freeze_step < lr_warmup_steps:
        notice(
            f"onebit_adam: the variance is frozen at step {freeze_step}, before the end of the learning rate warm-up "
            f"(warmup_steps={lr_warmup_steps}); a freeze_step of at least {lr_warmup_steps} is safer"
        )
    return {"rounds_variance": cuts, **options, "freeze_step": freeze_step}


def onebit_adam_bytes(num_elements: int, num_ranks: int, *, rounds_variance: bool) -> int:
    """Return the size in bytes of 1-bit Adam's states for a parameter after the freeze, excluding message buffers.

    The states are the compression error of this rank, the denominator, and the error of the shard that belongs to this
    rank. Before the freeze, the states are smaller, because only the two moments of this rank's shard exist.
    """
    piece = Pieces(num_elements, num_ranks).size
    return num_elements * (4 + (2 if rounds_variance else 4)) + piece * 4


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)
