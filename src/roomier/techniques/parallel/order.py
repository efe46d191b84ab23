"""Order of the collectives of a sharded model, which must be the same on all ranks.

[Note: headers]
Ranks match collectives by their order. If ranks run different modules or have gradients of different parameters,
collectives would combine shards of different parameters, or gloo would abort the process because the sizes of the
messages differ. Each pairwise collective therefore also sends a header of a few bytes, which states the unit and, for a
reduction, the parameters with a gradient. The payloads of different headers have different tags, so gloo does not match
them, and a rank that receives a different header raises an error. Headers and payloads are sent at the same time, so
headers add no latency. The last collective of a step is the reduction of the root unit or, if the root unit has no
gradient, a header alone. Without it, a rank with an additional collective would wait for a rank that has completed its
backward pass.

[Note: a fixed order]
With ``find_unused_parameters``, ranks may skip units. Every rank then runs the collectives of all units in the order of
the network: it also all-gathers units that its forward pass skips, and reduces zeros for them in the backward pass. One
reduction per step determines the parameters that have a gradient on any rank. The gradients of all others are removed,
so that optimizers skip these parameters as in a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from roomier.core import torch_fake, torch_private
from roomier.core.errors import TrainingError
from roomier.core.ranks import announce
from roomier.techniques.parallel.collectives import Check, exchange, no_check, wait_for

_WORD_BITS = 62  # bits of an int64 that encode parameters with a gradient
_PRIME = 2**31 - 1  # tags of gloo are smaller


class Order:
    """Sequence of the collectives of the units of a model.

    Args:
        network: the sharded model.
        units: the units in the order of the network. The first unit is the root.
        ranks: group of the ranks that store the model; None means all ranks of the run.
        replicas: group of the ranks with the same shard in other replicas; None without replicas.
        is_fixed: whether ranks may skip units. See [Note: a fixed order].

    Attributes:
        trace: hash of the units whose forward pass has run and of the gradients that were reduced; 0 if ``is_fixed``.
    """

    def __init__(
        self,
        network: nn.Module,
        units: Sequence[FSDPModule],
        ranks: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        *,
        is_fixed: bool,
    ) -> None:
        self.trace = 0
        self._units, self._ranks, self._replicas, self._is_fixed = units, ranks, replicas, is_fixed
        modules = {module: name for name, module in network.named_modules()}
        self._names = ["the root", *(modules[each] for each in units[1:])]
        parameters = {parameter: name for name, parameter in network.named_parameters()}
        self._parameters = [[parameters[p] for p in torch_private.sharded_parameters_of(unit)] for unit in units]
        self._next = self._below = len(units)  # next unit of the forward pass; last unit whose reduction has started
        self._last = -1
        self._gradients = 0  # bit i: the unit that is being reduced has a gradient of parameter i
        self._num_words = 0
        self._used = [[False] * len(names) for names in self._parameters]
        if not is_fixed:
            self._num_words = -(-max(map(len, self._used)) // _WORD_BITS)
        for number, unit in enumerate(units):
            torch_private.call_before(unit, "post_backward", partial(self._before_reduction, number))
            if number:
                torch_private.call_before(unit, "pre_forward", partial(self._before_forward, number))
            if number and is_fixed:
                torch_private.call_before(unit, "pre_backward", partial(self._finish_above, number))

    # Forward and backward -------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Start a forward pass."""
        self._next = 1

    def end_forward(self) -> None:
        """All-gather the units that the forward pass skipped, if ranks may skip units."""
        if self._is_fixed:
            self._pass_until(len(self._units))

    def begin_backward(self) -> None:
        """Start a backward pass."""
        self.end_forward()
        self._below = len(self._units)

    def _before_forward(self, number: int) -> None:
        if not self._is_fixed:
            self._note(number)
            return
        if number < self._next:  # a further use of the units
            self.end_forward()
            self._next = 1
        self._pass_until(number)
        self._next = number + 1

    def _pass_until(self, number: int) -> None:
        for unit in self._units[self._next : number]:
            torch_private.unshard_and_reshard(unit)
        self._next = number

    def _before_reduction(self, number: int) -> None:
        unit = self._units[number]
        if self._is_fixed:
            self._finish_above(number)
            self._below = min(self._below, number)
            self._used[number] = torch_private.used_in_window(unit, self._used[number])
            return
        gradients = torch_private.with_gradient(unit)
        if gradients:
            self._gradients = gradients
            self._note(gradients * 2 * len(self._units) + number)

    def _finish_above(self, number: int) -> None:
        while self._below > number + 1:
            self._below -= 1
            unit = self._units[self._below]
            unit.unshard()
            torch_private.end_backward_of(unit)

    def remove_unused(self) -> None:
        """Set the gradients of the parameters that have no gradient on any rank to None. If ranks may skip units, this
        method runs one collective."""
        if not self._is_fixed:
            return
        is_used = torch.tensor([each for used in self._used for each in used], dtype=torch.uint8)
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=self._ranks)
        sharded = (each for unit in self._units for each in torch_private.sharded_parameters_of(unit))
        for parameter, found in zip(sharded, is_used.tolist(), strict=True):
            if not found:
                parameter.grad = None

    # Headers --------------------------------------------------------------------------------------------------------

    def all_gather(self, number: int, group: dist.ProcessGroup) -> tuple[int, Check]:
        """Send the header of the all-gather of unit ``number``.

        Returns:
            The tag of the payloads, and a function that receives the headers of the other ranks and compares them.
        """
        return self._send(2 * number, 0, [group])

    def reduce_scatter(self, number: int, group: dist.ProcessGroup) -> tuple[int, Check]:
        """Send the header of the reduction of unit ``number``. See :meth:`all_gather`."""
        return self._send(2 * number + 1, self._gradients, [group, *([self._replicas] if self._replicas else [])])

    def end_step(self, group: dist.ProcessGroup) -> None:
        """Compare the end of the last backward pass of a step over the ranks of ``group`` and the replicas."""
        if self._last != 1:  # the reduction of the root was not the last collective
            _, check = self._send(2 * len(self._units), 0, [group, *([self._replicas] if self._replicas else [])])
            check()
        self._last = -1

    def _send(self, call: int, gradients: int, groups: list[dist.ProcessGroup]) -> tuple[int, Check]:
        self._last = call
        words = [gradients >> _WORD_BITS * word & (1 << _WORD_BITS) - 1 for word in range(self._num_words)]
        own = torch.tensor([call, *words], device="cpu")
        if torch_fake.is_fake([own]):
            return 0, no_check
        received = [own.repeat(group.size(), 1) for group in groups]
        work = [
            each
            for group, rows in zip(groups, received, strict=True)
            for each in exchange([own] * group.size(), list(rows), group)
        ]

        def check() -> None:
            wait_for(work)
            for group, rows in zip(groups, received, strict=True):
                if not bool((rows == own).all()):
                    error = self._error(dist.get_process_group_ranks(group), rows.tolist())
                    announce(error)  # another rank may lose the connection before it receives this rank's header
                    raise error

        return 1 + hash((call, gradients)) % (_PRIME - 1), check

    def _note(self, event: int) -> None:
        self.trace = (self.trace * 1_000_003 + event) % _PRIME

    # Errors ---------------------------------------------------------------------------------------------------------

    def _error(self, ranks: Sequence[int], headers: Sequence[Sequence[int]]) -> TrainingError:
        calls = {call for call, *_ in headers}
        if len(calls) == 1:
            return self._other_gradients(ranks, headers, calls.pop() // 2)
        by_call = {call: [rank for rank, row in zip(ranks, headers, strict=True) if row[0] == call] for call in calls}
        found = "; ".join(f"ranks {by_call[call]} {self._describe(call)}" for call in sorted(by_call))
        names = [self._names[call // 2] for call in sorted(calls) if call // 2 < len(self._units)]
        return TrainingError(
            "training_step",
            names,
            f"the ranks ran different parts of the model, or ran them in a different order: {found}",
            "Run the modules in the order in which they are registered"
            if self._is_fixed
            else f"Run the same modules in the same order on all ranks, or {_FIND_UNUSED}",
        )

    def _describe(self, call: int) -> str:
        if call == 2 * len(self._units):
            return "completed the backward pass"
        return f"{'reduce the gradients' if call % 2 else 'all-gather the parameters'} of {self._names[call // 2]!r}"

    def _other_gradients(self, ranks: Sequence[int], headers: Sequence[Sequence[int]], number: int) -> TrainingError:
        names = self._parameters[number]
        holders: dict[str, list[int]] = {}
        for bit, name in enumerate(names):
            word, shift = 1 + bit // _WORD_BITS, bit % _WORD_BITS
            holders[name] = [rank for rank, row in zip(ranks, headers, strict=True) if row[word] >> shift & 1]
        differing = [name for name in names if 0 < len(holders[name]) < len(ranks)]
        return TrainingError(
            "training_step",
            differing[:5],
            f"has a gradient only on ranks {holders[differing[0]]} of {list(ranks)}, but all ranks reduce the "
            f"gradients of {self._names[number]!r} together",
            f"Use the same parameters on all ranks, or {_FIND_UNUSED}",
        )


_FIND_UNUSED = "add 'find_unused_parameters': True to Trainer(strategy={'name': ...})"
