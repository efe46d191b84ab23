"""1-bit Adam: Adam whose momentum travels as signs once the variance has settled.

[Note: 1-bit Adam]
Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed"
(arXiv 2102.02888), Algorithm 1. For ``freeze_step`` steps it is Adam on gradients averaged in full precision. Then the
variance ``v`` is frozen, and of rank ``i`` with its own gradient ``g_i`` travels only the momentum, as signs ``C[.]``:

    m_i = beta1 * m + (1 - beta1) * g_i
    c_i = C[m_i + e_i];                  e_i = m_i + e_i - c_i         each rank, with its error e_i
    m = C[mean over ranks of c_i + s];   s = mean of c_i + s - m       the owner of each piece, with its error s
    x = x - lr * m / (sqrt(v) + eps)                                   each rank, with all pieces of m

What the paper leaves open, or we do otherwise: both moments are corrected for their start as in torch's Adam, ``v`` as
of the step at which it was frozen, so nothing jumps there; weight decay is decoupled, as in AdamW; scales belong to
blocks and are means of absolute values (see ``sign_code.py``); and a frozen variance is at least
:data:`LEAST_VARIANCE` of the mean over its tensor. All elements of a block get the same size from the code, so one
whose variance is near zero (the row of a rare token) would otherwise be thrown far off by the noise of its neighbours.

[Note: what a rank holds]
Bytes for each parameter beside its fp32 weight (4) and gradient (4), on N ranks:
before the freeze 8/N (both moments of the own piece; the owner updates the weights of its piece and all gather them),
and one bucket of messages; after it 4 for ``e``, 4 for the frozen denominator (2 with ``rounds_variance``), 4/N for
``s`` and 0.16 for ``m``, which is kept as its code; 0.31 for messages within a step. Each rank applies the whole
update, so none of weights, ``e`` and the denominator can be cut: to gather weights from owners costs more bytes than
the signs save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import CheckpointError, PlanError
from roomier.core.exchange import Exchange, all_reduce_bytes
from roomier.core.log import notice
from roomier.core.units import format_bytes
from roomier.optim.sign_code import Pieces, SignCode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LEAST_VARIANCE = 0.01
DEFAULT_FREEZE = 0.2  # of the steps of a run
_BUCKET_ELEMENTS = 2**23  # 32 MiB of fp32: what is averaged at once before the freeze


class OneBitAdam(Optimizer):
    """Adam that sends one bit a parameter after its first ``freeze_step`` steps; see [Note: 1-bit Adam].

    It averages what it needs among all ranks of the default process group by itself: gradients must be those of each
    rank alone, and every rank must call :meth:`step` equally often.

    Args:
        params: as for any optimizer; all on one device.
        lr: the learning rate.
        betas: decay of the momentum and of the variance.
        eps: added to the root of the variance.
        weight_decay: decoupled, times ``lr`` each step.
        freeze_step: steps in full precision; the paper takes 15 to 25 % of a run, at least until the learning rate
            has warmed up and the variance has settled.
        rounds_variance: keep the frozen denominators in bfloat16 (zero1).
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
        # Groups stay as they are from here on: the code of the momentum is laid out for these parameters.
        self._entries = [(p, group) for group in self.param_groups for p in group["params"] if p.numel()]
        self._pieces = [Pieces(p.numel(), self._exchange.num_ranks) for p, _ in self._entries]
        self._code: SignCode | None = None
        self._momentum: Tensor | None = None  # the code of m, once the variance is frozen

    @property
    def is_frozen(self) -> bool:
        """Whether the variance is frozen, and momentum travels as signs."""
        return self._momentum is not None

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far; see [Note: bytes sent] in ``core/exchange.py``."""
        return self._exchange.bytes_sent

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.is_frozen and self._num_steps >= self.freeze_step:
            self._freeze()
        self._num_steps += 1
        if self.is_frozen:
            self._step_compressed()
        else:
            for bucket in self._buckets():
                self._step_exact(bucket)
        return loss

    # ---- in full precision ---------------------------------------------------------------------------------------

    def _buckets(self) -> Iterator[list[int]]:
        """Indices of parameters whose gradients are averaged together: of one dtype, up to a size."""
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
        """Adam: each rank averages and updates its piece of each parameter in ``bucket``; all gather the pieces."""
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
        """Put the updated own piece of parameter ``index`` into ``new``."""
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
        """From the own pieces of both moments to what :meth:`_step_compressed` needs; all ranks at the same step."""
        self._start_code()
        for index, (parameter, group) in enumerate(self._entries):
            state = self.state[parameter]
            variance = self._gather(index, state.pop("exp_avg_sq"))
            variance.clamp_(min=variance.mean() * LEAST_VARIANCE)
            correction = 1 - group["betas"][1] ** self._num_steps
            self._hold_denominator(parameter, variance.div_(correction).sqrt_().add_(group["eps"]))
            # The first compressed momentum starts from the exact one: it is in the error, and the code is still 0.
            momentum = self._gather(index, state.pop("exp_avg"))
            state["server_error"] = torch.zeros_like(self._own(index, momentum))
            state["worker_error"] = momentum.mul_(group["betas"][0])
        self._say_frozen()

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

    def _say_frozen(self) -> None:
        assert self._code is not None
        num_ranks = self._exchange.num_ranks
        if num_ranks == 1:
            return
        now = 2 * (num_ranks - 1) * self._code.row_bytes
        before = all_reduce_bytes(sum(4 * parameter.numel() for parameter, _ in self._entries), num_ranks)
        notice(
            f"onebit_adam: the variance is frozen after {self._num_steps} steps; from here on each rank sends "
            f"{format_bytes(now)} a step, {before / now:.1f} times less than float32 gradients ({format_bytes(before)})"
        )

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _own(self, index: int, flat: Tensor) -> Tensor:
        return flat[self._pieces[index].slice_of(self._exchange.rank)]

    def _gather(self, index: int, own: Tensor) -> Tensor:
        """The whole of a tensor (``[numel]``, new) of which each rank holds its ``own`` piece."""
        pieces = self._pieces[index]
        rows = own.new_zeros(self._exchange.num_ranks, pieces.size)
        rows[self._exchange.rank, : len(own)] = own
        self._exchange.all_gather(rows)
        return pieces.from_rows(rows)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """States by index of the parameter, as DTensors cut among the ranks (plain tensors with one rank).

        Before the freeze ``exp_avg`` and ``exp_avg_sq``; after it ``exp_avg``, ``denominator``, ``server_error``, each
        ``[numel]``, and ``worker_error``, ``[num_ranks, numel]``, a row a rank. No tensor that was there is copied.
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
        """What this rank holds of each tensor of :meth:`state_dict`."""
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
        """An empty tensor for a state of :meth:`state_dict` that is to be read, cut as this rank needs it."""
        if not shape:
            return torch.empty(shape, dtype=dtype)
        inside = Pieces(shape[0], self._exchange.num_ranks).slice_of(self._exchange.rank)
        device = self._entries[0][0].device
        return self._as_shard(torch.empty(inside.stop - inside.start, *shape[1:], dtype=dtype, device=device), shape)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave; tensors may be whole or cut. Every rank must call it.

        Where ranks are other in number, the errors of several become that of one, or some ranks begin without: their
        mean, which is what the average of all ranks lacks, stays.

        Raises:
            CheckpointError: a parameter has no states in it.
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
            action = "Load the weights alone, or a checkpoint of the same model"
            raise CheckpointError("optimizer", missing[:5], "the checkpoint has no states of these parameters", action)
        first = states[indices[self._entries[0][0]]]
        self._num_steps = int(first["step"])
        if "denominator" in first:
            self._start_code()
        for index, (parameter, group) in enumerate(self._entries):
            saved = {name: self._local(value) for name, value in states[indices[parameter]].items()}
            if self._momentum is None:
                kept = {name: saved[name].to(parameter.device) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = kept
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
        # Cut otherwise, it is no longer of one size in each block. What the code leaves out goes into the error.
        row = self._momentum[rank]
        coded = self._code.encode_piece(index, momentum, row, rank, takes_largest=num_ranks == num_ranks_then)
        error = error.add(momentum - coded, alpha=beta1)
        rows = saved["worker_error"].to(device, dtype)
        worker_error = rows[0] if len(rows) == 1 else rows.sum(0)
        if num_ranks != num_ranks_then:
            worker_error = worker_error * (num_ranks / num_ranks_then)
        self.state[parameter].update(server_error=error, worker_error=worker_error)

    def _indices(self) -> dict[nn.Parameter, int]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {parameter: index for index, parameter in enumerate(parameters)}

    def _as_shard(self, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._exchange.num_ranks == 1:
            return local
        from torch.distributed.device_mesh import init_device_mesh  # slow to import: one process does without
        from torch.distributed.tensor import DTensor, Shard

        if self._mesh is None:
            self._mesh = init_device_mesh(local.device.type, (self._exchange.num_ranks,))
        stride = (shape[-1], 1) if len(shape) == 2 else (1,)
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _local(self, value: Tensor) -> Tensor:
        """This rank's part of a stored tensor; it keeps no other part alive."""
        if not value.dim() or self._exchange.num_ranks == 1:
            return value
        from torch.distributed.tensor import DTensor

        if isinstance(value, DTensor):
            return value.to_local()
        return value[Pieces(len(value), self._exchange.num_ranks).slice_of(self._exchange.rank)].clone()


def onebit_options(
    options: Mapping[str, Any], num_steps: Callable[[], float], lr_warmup_steps: int, *, cuts: bool
) -> dict[str, Any]:
    """``options`` with what a run decides: when the variance is frozen, and whether it is rounded.

    Args:
        num_steps: gives the optimizer steps of the run, infinite where unknown.
        lr_warmup_steps: steps in which the learning rate still rises.
        cuts: the strategy is zero1.

    Raises:
        PlanError: ``freeze_step`` is no count of steps; or it is not given and the run has no length.
    """
    length, given = num_steps(), options.get("freeze_step")
    if given is None and length == float("inf"):
        action = "Give it: optimizer={'name': 'onebit_adam', 'freeze_step': 1000}, about a fifth of the run"
        raise PlanError(
            "optimizer.options.freeze_step", None, "is needed where the length of the run is not known", action
        )
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        action = "Give the steps in full precision, about a fifth of the run"
        raise PlanError("optimizer.options.freeze_step", given, "is not a positive whole number", action)
    freeze_step: int = max(1, round(DEFAULT_FREEZE * length), lr_warmup_steps) if given is None else given
    if freeze_step >= length:
        notice(f"onebit_adam: nothing is compressed: the run has {length:.0f} steps, freeze_step is {freeze_step}")
    elif freeze_step < lr_warmup_steps:
        notice(
            f"onebit_adam: the variance is frozen at step {freeze_step}, while the learning rate still rises "
            f"(warmup_steps={lr_warmup_steps}); a freeze_step of at least that is safer"
        )
    return {"rounds_variance": cuts, **options, "freeze_step": freeze_step}


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)
