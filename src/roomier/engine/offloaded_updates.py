"""Updates of parameters whose optimizer states are not on the device. The states of one unit at a time are copied to
the device, updated by the optimizer itself, and copied back.

[Note: three exact modes]
All modes compute bit-identical updates. They differ in when a unit is updated:

- *plain*: after the backward pass, one unit after another.
- *deferred*: immediately before the next forward pass of its block, while the device still computes earlier blocks. The
  values of the parameter groups (such as the learning rate) at the time of the step are stored with the gradients.
  Units outside the blocks are updated after the backward pass.
- *speculative*: in the last backward pass of a step, as soon as the gradients of the unit are complete. The step
  accepts this update if the gradients and the parameter groups are unchanged; otherwise, it restores the previous
  weights and states, and the unit is updated again as in *plain*. The step compares the version counters of the
  gradients, so changes by hooks are also detected. Clipping with the factor 1 does not count as a change.

Code between two steps must not read parameters while updates are pending. It must first call ``settle()``, which
completes deferred updates and rejects speculative updates.

[Note: stream of the updates]
With sharded parameters, a gradient becomes complete on the stream of its collective. An update on this stream would
delay the next collective, and an update on the compute stream would delay the backward pass, so on an accelerator, all
updates run on a separate stream. It waits for the stream on which the gradient is complete, and the compute stream
waits for the updates when the step accepts them.

[Note: gathered ahead]
With sharded parameters, the forward pass of a unit starts the all-gather of the next unit. The deferred update of a
unit must therefore be complete before the forward pass of the preceding unit, so the hook of each unit completes the
updates of all units up to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from roomier.core import torch_private
from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import computing_stream
from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.core.sharded import local_part
from roomier.core.torch_offload import Gathers
from roomier.engine.facts import Facts
from roomier.engine.narrowed import Homes, Options, check_no_step_hooks, homes_of, options_of, step_only, with_options
from roomier.engine.updates import Change, ChangeAll, ParametersOnDevice, Updates, weakly
from roomier.plan.choices import OPTIMIZERS
from roomier.techniques.offload.outside_reads import OutsideReads
from roomier.techniques.offload.regions import Region
from roomier.techniques.offload.residency import UPDATE, Residency, absent_watch
from roomier.techniques.offload.states import OffloadedStates, Unit
from roomier.techniques.parallel.parallel import Parallel
from roomier.techniques.precision.scaler import LossScaler

_NUM_REJECTED = 4  # number of consecutive steps with rejected updates after which speculation pauses
_NUM_PAUSED = 32  # number of steps in a pause


@dataclass
class _Pending:
    """A deferred update.

    Attributes:
        gradients: the gradient of each parameter to update.
        options: the values of the parameter groups at the time of the step.
        changes: functions that change the gradients in a tier before the update.
    """

    gradients: dict[Tensor, Tensor]
    options: Options
    changes: Sequence[ChangeAll]


@dataclass
class _Speculation:
    """A speculative update that has not been accepted or rejected yet.

    Attributes:
        versions: ``id()`` and version of each gradient from which the update was computed.
        options: the values of the parameter groups that the update used.
    """

    versions: dict[Tensor, tuple[int, int]]
    options: Options


class OffloadedUpdates(Updates):
    """Updates of parameters whose optimizer states are in a tier. See [Note: three exact modes].

    Args:
        optimizers: the optimizers of the module's parameters.
        units: the units whose states are in a tier. Units outside the blocks come first.
        states: storage for the optimizer states of ``units``.
        mode: ``"plain"``, ``"deferred"`` or ``"speculative"``.
        facts: the network, whose all-gathers wait for updates, and the device of the parameters.
        parameters: the parameters in a tier, or an object without effect if all parameters stay on the device.
        parallel: wrapper that distributes the network across ranks.

    Attributes:
        mode: current mode; ``"deferred"`` becomes ``"plain"`` if code outside a block reads the block's parameters.
    """

    acts = True

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        units: Sequence[Unit],
        states: OffloadedStates,
        *,
        mode: str,
        facts: Facts,
        parameters: ParametersOnDevice,
        parallel: Parallel,
    ) -> None:
        super().__init__(parallel, parameters)
        self.mode, self.away = mode, states.away
        self._optimizers, self._units, self._states = list(optimizers), list(units), states
        self._device, self._gathers = facts.device, Gathers(facts.network)
        self._gathers_ahead = parallel.gathers_ahead or bool(self._gathers)  # see [Note: gathered ahead]
        self._unit_of = {parameter: number for number, unit in enumerate(units) for parameter in unit.parameters}
        self._homes: Homes = homes_of(optimizers)
        self._pending: dict[int, _Pending] = {}  # keys are in the order of the forward passes
        self._speculations: dict[int, _Speculation] = {}
        self._waiting: dict[int, set[Tensor]] = {}  # parameters of each unit whose gradients are not complete
        self._is_last = True
        # The device memory of offloaded parameters belongs to the compute stream.
        has_stream = capabilities_of(facts.device).has_streams and not parameters.leaves
        self._stream = torch.Stream(facts.device) if has_stream else None
        self._was_rejected = self._is_closed = False
        self._num_rejected = self._num_steps_paused = 0
        self._handles: list[RemovableHandle] = []
        if mode == "deferred":
            self._watch_forwards()
        elif mode == "speculative":
            self._watch_gradients()

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Prepare the forward pass of a step. If parameters are gathered ahead, complete the first pending update."""
        self._reject_all()  # left over from a step without an update, such as a step that a hook skipped
        self._homes = homes_of(self._optimizers)
        self.parameters.begin_step(list(self._pending))
        if self._gathers_ahead and self._pending:
            self.complete(next(iter(self._pending)))

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Prepare the forward pass of a micro-batch."""
        self._is_last = is_last

    def backward(self, run: Callable[..., None], change: Change | None) -> None:
        """Compute gradients. The last backward pass of a step starts reading the optimizer states from the tier."""
        self._complete_all()  # updates of blocks whose forward pass did not run
        # A change of the gradients after backward would cause all speculative updates to be rejected.
        if self._is_last and change is None and self._tries_speculation():
            self._waiting = {
                number: {each for each in unit.parameters if each.requires_grad and each in self._homes}
                for number, unit in enumerate(self._units)
                if self._states.has_states(number)
            }
            self._states.expect(list(reversed(range(len(self._units)))))
        elif self._is_last:
            self._states.expect(range(len(self._units)))
        try:
            run()
        finally:
            self._waiting = {}
        self.parameters.end_backward()

    def change(self, parameters: Iterable[Tensor], change: Change) -> None:
        """Change the gradients on the device, then the gradients in a tier."""
        self._complete_all()  # without a backward pass, gradients of the previous step may still wait for their update
        super().change(parameters, change)
        self.parameters.change(change)

    def clip(self, parameters: Sequence[Tensor], limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients. Reject speculative updates whose gradients or parameter groups have changed before, and
        all speculative updates if clipping changes the gradients."""
        if self._speculations:
            self._join()  # the updates read the gradients
        for number in [number for number in self._speculations if not self._is_valid(number)]:
            self._reject(number)
        norm = super().clip(parameters, limit, algorithm)
        if not self._speculations:
            return norm
        if norm is not None and float((limit / (norm + 1e-6)).clamp(max=1.0)) == 1.0:  # waits for the device
            for number, speculation in self._speculations.items():
                speculation.versions = self._versions(number)
        else:
            self._reject_all()
        return norm

    def step(self, optimizer: Optimizer, scaler: LossScaler, closure: Any = None) -> None:
        """Update the parameters of ``optimizer``, or store their gradients for a deferred update."""
        if closure is not None:
            closure()
        check_optimizer(optimizer)
        own = dict.fromkeys(each for group in optimizer.param_groups for each in group["params"])
        gradients = {each: each.grad for each in own if each.grad is not None}
        if not scaler.skips(optimizer):
            self._update(optimizer, own, [each for each in self._homes if each in gradients])
        try:
            for parameter in gradients:
                parameter.grad = None
            scaler.step(optimizer)  # only runs the optimizer's hooks and counters, because no gradients remain
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _update(self, optimizer: Optimizer, own: Mapping[Tensor, object], parameters: Sequence[Tensor]) -> None:
        by_unit: dict[int, list[Tensor]] = {}
        resident = []
        for parameter in parameters:
            number = self._unit_of.get(parameter)  # type: ignore[call-overload]
            if number is None:
                resident.append(parameter)
            else:
                by_unit.setdefault(number, []).append(parameter)
        for number in self.parameters.with_gradients():
            by_unit.setdefault(number, [])
        for number in [number for number in self._speculations if number in by_unit]:
            if self._is_valid(number):
                del by_unit[number], self._speculations[number]
                self._states.accept(number)
                self._join()
            else:
                self._reject(number)
        self._num_rejected = self._num_rejected + 1 if self._was_rejected else 0
        self._was_rejected = False
        step_only(self._homes, resident)
        now = [number for number in sorted(by_unit) if not self._is_deferred(number)]
        self._states.expect([*now, *sorted(by_unit.keys() - set(now))])  # deferred updates follow
        for number in now:
            self._update_unit(number, by_unit[number], own, self.parameters.changes)
        options, changes = options_of(optimizer), self.parameters.changes
        for number in sorted(by_unit.keys() - set(now)):
            pending = self._pending.setdefault(number, _Pending({}, {}, changes))
            pending.gradients.update(
                (each, gradient) for each in by_unit[number] if (gradient := each.grad) is not None
            )
            pending.options.update(options)  # a unit can have parameters of several optimizers
        self._states.expect(list(self._pending))

    def _update_unit(
        self, number: int, parameters: Sequence[Tensor], own: Mapping[Tensor, object], changes: Sequence[ChangeAll]
    ) -> None:
        with self._updating(), self.parameters.present(number, own, changes) as arrived:
            self._states.arrive(number)
            step_only(self._homes, list(dict.fromkeys([*parameters, *arrived])))
            self._states.leave(number)
        self._join()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Submit the work inside the context to the stream of the updates."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(computing_stream(self._device))
        with self._stream:
            yield

    def _join(self) -> None:
        """Make subsequent computation and all-gathers wait for the updates."""
        if self._stream is not None:
            computing_stream(self._device).wait_stream(self._stream)
            self._gathers.wait_for(self._stream)

    def _tries_speculation(self) -> bool:
        """Return whether this step updates units speculatively. If speculation is paused, also reduce the number of
        remaining steps of the pause."""
        if self.mode != "speculative":
            return False
        if self._num_rejected >= _NUM_REJECTED:
            self._num_rejected, self._num_steps_paused = 0, _NUM_PAUSED
        if self._num_steps_paused == 0:
            return True
        self._num_steps_paused -= 1
        return False

    def _is_deferred(self, number: int) -> bool:
        return self.mode == "deferred" and (self._units[number].module is not None or number in self.parameters.numbers)

    # Deferred updates

    def watch(self) -> AbstractContextManager[Any] | None:
        """Return a context for the first forward pass, which has no pending updates.

        If code outside a block reads the block's parameters, deferred updates would be too late, so the mode becomes
        ``"plain"``. If these parameters are offloaded, the context raises an error instead.
        """
        if self.parameters.leaves:
            return self.parameters.watch()
        return OutsideReads(self._units, self._be_plain) if self.mode == "deferred" else None

    def _be_plain(self, parameter: Tensor) -> None:
        self.mode = "plain"
        notice(
            f"a parameter of shape {tuple(parameter.shape)} is read outside the forward pass of its block, so blocks "
            "are updated after backward (offload.update='plain')"
        )

    def _watch_forwards(self) -> None:
        for number, unit in enumerate(self._units):
            if unit.module is not None:
                last = number + 1 if self._gathers_ahead else number
                hook = partial(weakly(self.complete_up_to), last)
                # This hook runs before the hooks of fully_shard, which read the shard.
                self._handles.append(unit.module.register_forward_pre_hook(hook, prepend=True))
        self.parameters.watch_forwards(weakly(self.complete))

    def complete_up_to(self, last: int, *_: Any) -> None:
        """Complete the deferred updates of the units with numbers up to ``last``."""
        for number in [number for number in self._pending if number <= last]:
            self.complete(number)

    def _complete_all(self) -> None:
        for number in list(self._pending):
            self.complete(number)

    def complete(self, number: int) -> None:
        """Complete the deferred update of a unit, if it is pending."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        parameters = list(pending.gradients)
        current = [each.grad for each in parameters]
        # The forward pass of a step can run inside autocast and inside torch.inference_mode or no_grad.
        with torch.autocast(self._device.type, enabled=False), with_options(self._homes, pending.options):
            try:
                for parameter, gradient in pending.gradients.items():
                    parameter.grad = gradient
                self._update_unit(number, parameters, self._homes, pending.changes)
            finally:
                for parameter, before in zip(parameters, current, strict=True):
                    parameter.grad = before

    # Speculative updates

    def _watch_gradients(self) -> None:
        for number, unit in enumerate(self._units):
            for parameter in unit.parameters:
                hook = partial(weakly(self.take), number)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def take(self, number: int, parameter: Tensor) -> None:
        """Record that the gradient of ``parameter`` is complete. After the last gradient of a unit, update the unit
        speculatively."""
        waiting = self._waiting.get(number)
        if not waiting:
            return
        waiting.discard(parameter)
        if waiting:
            return
        del self._waiting[number]
        parameters = [each for each in self._units[number].parameters if each.grad is not None and each in self._homes]
        with self._updating():
            self._states.begin_speculation(number)
            step_only(self._homes, parameters)
            self._states.leave(number, is_speculative=True)
        self._speculations[number] = _Speculation(self._versions(number), options_of(*self._optimizers))

    def _versions(self, number: int) -> dict[Tensor, tuple[int, int]]:
        found: dict[Tensor, tuple[int, int]] = {}
        for parameter in self._units[number].parameters:
            if parameter.grad is not None:
                found[parameter] = (id(parameter.grad), torch_private.version_of(local_part(parameter.grad)))
        return found

    def _is_valid(self, number: int) -> bool:
        speculation = self._speculations[number]
        return speculation.versions == self._versions(number) and speculation.options == options_of(*self._optimizers)

    def _reject(self, number: int) -> None:
        del self._speculations[number]
        with self._updating():
            self._states.reject(number)
        self._join()
        self._was_rejected = True

    def _reject_all(self) -> None:
        for number in list(self._speculations):
            self._reject(number)

    # Between steps

    def settle(self) -> None:
        """Complete deferred updates, and reject speculative updates."""
        if self._is_closed:
            return
        self._complete_all()
        self._reject_all()
        with self._updating():
            self._states.settle()
        self._join()
        self.parameters.settle()

    def place(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Replace tensors on the meta device with memory in the tier.

        Raises:
            CheckpointError: the states do not fit into the tier.
        """
        if not self._is_closed:
            self._states.place(states)

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Move the loaded states of the optimizers to the tier."""
        if self._is_closed:
            return
        self._pending, self._speculations = {}, {}
        with self._updating():
            self._states.take_loaded()
        self._join()

    def close(self) -> None:
        """Complete pending updates, remove all hooks, and free the tier. States and parameters remain readable."""
        if self._is_closed:
            return
        self.settle()
        self._is_closed, self.away = True, frozenset()
        self._states.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.parameters.close()


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that parameters of ``optimizer`` can be updated one unit at a time.

    Raises:
        PlanError: the class of ``optimizer`` is not supported.
        TrainingError: ``optimizer`` has hooks that run before its step.
    """
    if isinstance(optimizer, LBFGS):
        problem = "does not support LBFGS, whose update of a parameter depends on all gradients"
        raise PlanError("offload.optimizer_states", type(optimizer).__name__, problem, "Use another optimizer")
    kind = type(optimizer)
    elementwise = {each.made_by for each in OPTIMIZERS.values() if each.is_elementwise}
    is_known = f"{kind.__module__}.".startswith(("torch.optim.", "roomier."))
    if not is_known and f"{kind.__module__}:{kind.__qualname__}" not in elementwise:
        problem = "is not supported, because its update of a parameter can depend on other parameters"
        action = "Use an optimizer of torch.optim, or offload only activations"
        raise PlanError("offload: optimizer", kind.__name__, problem, action)
    check_no_step_hooks(optimizer, "remove offload.optimizer_states and offload.parameters")


class ParameterTier(ParametersOnDevice):
    """Parameters and gradients that are stored in a tier, in regions.

    Args:
        residency: the offloaded parameters, in regions.
        units: the units in which parameters are updated. A unit whose parameters are in a region is updated while the
            region is on the device.
        homes: the parameters that optimizers update, in the order of the optimizers.
        parallel: wrapper that distributes the network across ranks.
    """

    leaves = True

    def __init__(
        self, residency: Residency, units: Sequence[Unit], homes: Mapping[Tensor, object], parallel: Parallel
    ) -> None:
        self._residency, self._homes, self._parallel = residency, homes, parallel
        by_parameter = {parameter: region for region in residency.regions for parameter in region.parameters}
        self.regions: dict[int, Region] = {
            number: by_parameter[unit.parameters[0]]
            for number, unit in enumerate(units)
            if unit.parameters[0] in by_parameter
        }
        self.numbers = self.regions.keys()
        self.norms = residency.gradients.norms
        self._is_unscaled = False
        residency.gradients.measures_norms = True

    def begin_step(self, pending: Sequence[int]) -> None:
        gradients = self._residency.gradients
        self.changes, self._is_unscaled = (), False
        gradients.norms.clear()
        for number, region in self.regions.items():
            if number not in pending:
                gradients.forget(region)
        gradients.begin_step()

    def watch(self) -> AbstractContextManager[Any]:
        return absent_watch(self._residency)

    def watch_forwards(self, complete: Callable[[int], object]) -> None:
        numbers = {region: number for number, region in self.regions.items()}
        self._residency.before_use.append(lambda region: complete(numbers[region]) if region in numbers else None)

    def end_backward(self) -> None:
        self._residency.gradients.leave_complete()

    def with_gradients(self) -> list[int]:
        return [number for number, region in self.regions.items() if self._residency.gradients.has(region)]

    @contextmanager
    def present(
        self, number: int, own: Mapping[Tensor, object], changes: Sequence[ChangeAll]
    ) -> Iterator[list[Tensor]]:
        region = self.regions.get(number)
        if region is None:
            yield []
            return
        residency, gradients = self._residency, self._residency.gradients
        residency.use((region,), UPDATE)
        arrived: list[Tensor] = [each for each in gradients.arrive(region) if each in own]
        for parameter in arrived:
            assert parameter.grad is not None
            for change in changes:
                change([local_part(parameter.grad)])
        left = [each for each in region.parameters if each.grad is not None and each not in own]
        yield arrived
        residency.changed(region)
        if left:  # parameters of a different optimizer
            gradients.leave(region)
        else:
            gradients.forget(region)

    def change(self, change: Change) -> None:
        gradients = self._residency.gradients
        for region in self.regions.values():
            if not gradients.has(region):
                continue
            for parameter in gradients.arrive(region):
                assert parameter.grad is not None
                own = local_part(parameter.grad)
                for earlier in self.changes:
                    earlier([own])
                change(parameter, own)
                (gradients.norms[parameter],) = torch_private.norms_of([own])
            gradients.leave(region)
        self.changes = ()

    def unscale_away(self, optimizer: Optimizer, factor: Tensor) -> Tensor:
        if not self._is_unscaled:
            self.scale_away(factor)
            self._is_unscaled = True
        own = {each for group in optimizer.param_groups for each in group["params"]}
        norms = {each: norm for each, norm in self._residency.gradients.norms.items() if each in own}
        # The norm of a gradient is finite if all its elements are finite, unless the sum of their squares overflows.
        return (~self._parallel.join_norms(norms).isfinite()).to(factor.dtype)

    def change_away(self, change: ChangeAll) -> None:
        self.changes += (change,)

    def scale_away(self, factor: float | Tensor) -> None:
        norms = self._residency.gradients.norms
        norms.update({parameter: norm * factor for parameter, norm in norms.items()})
        self.change_away(lambda gradients: [each.mul_(factor) for each in gradients])

    def settle(self) -> None:
        self._residency.settle()
        self._residency.show_stored()

    def close(self) -> None:
        self._residency.detach()
