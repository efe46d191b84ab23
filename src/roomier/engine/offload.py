"""Creates the object that updates parameters if a Plan offloads parameters or optimizer states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import PlanError
from roomier.core.sharded import local_part
from roomier.core.torch_offload import Gathers
from roomier.engine.facts import Facts
from roomier.engine.narrowed import homes_of
from roomier.engine.offloaded_updates import OffloadedUpdates, check_optimizer
from roomier.engine.parallel import Parallel
from roomier.engine.parameter_tier import tier_of
from roomier.engine.parameter_updates import ParametersOnDevice, ParameterTier
from roomier.plan import Plan
from roomier.plan.offload_rules import update_mode
from roomier.techniques.offload.residency import Residency
from roomier.techniques.offload.staging import staging_of
from roomier.techniques.offload.states import OffloadedStates, record_bytes
from roomier.techniques.offload.units import first_leaving, units_around, units_of
from roomier.techniques.optim.state_bytes import state_bytes


def offloaded_updates(
    plan: Plan, facts: Facts, optimizers: Sequence[Optimizer], parallel: Parallel, residency: Residency | None
) -> OffloadedUpdates:
    """Return updates whose optimizer states or parameters are in the tiers that ``plan`` names.

    Args:
        residency: the offloaded parameters; None if no parameters are offloaded.

    Raises:
        PlanError: an optimizer or manual optimization does not support the offloading that ``plan`` requests.
        TierError: the tier cannot be created.
    """
    for optimizer in optimizers:
        check_optimizer(optimizer)
    homes = homes_of(optimizers)
    trained = [each for each in homes if isinstance(each, nn.Parameter)]
    if residency is None:
        modules = parallel.units or _closed(facts.network, facts.blocks)
        units = units_of(trained, modules, [*parallel.root_parameters, *parallel.late_parameters])
    else:
        units = units_around([region.parameters for region in residency.regions], trained)
    bytes_of = {
        parameter: _state_bytes(parameter, *homes[parameter]) for unit in units for parameter in unit.parameters
    }
    unit_bytes = [sum(bytes_of[each] for each in unit.parameters) for unit in units]
    has_tier = plan.offload.optimizer_states != "none"
    first = first_leaving(unit_bytes, plan.offload.share) if has_tier else len(units)
    mode = mode_of(plan, facts, optimizers)
    is_speculative = mode == "speculative"
    sizes = [record_bytes(unit, bytes_of, holds_weights=is_speculative) for unit in units[first:]]
    sizes *= 1 + is_speculative
    tier = tier_of(
        plan.offload,
        plan.offload.optimizer_states,
        sizes,
        facts.device,
        num_buffers=plan.offload.buffers,
        num_ahead=None if plan.offload.buffers > 1 else 0,
        shares_large=True,
    )
    staging, gathers = staging_of(tier, sizes, facts.device), Gathers(facts.network)
    return OffloadedUpdates(
        optimizers,
        units,
        OffloadedStates(units, first, optimizers, staging, is_speculative=is_speculative),
        mode=mode,
        device=facts.device,
        gathers=gathers,
        gathers_ahead=parallel.gathers_ahead or bool(gathers),
        parameters=ParametersOnDevice() if residency is None else ParameterTier(residency, units, homes, parallel),
        batch_plan=plan.batch,
    )


def mode_of(plan: Plan, facts: Facts, optimizers: Sequence[Optimizer]) -> str:
    """Return the update mode; see [Note: three exact modes].

    Raises:
        PlanError: with manual optimization, the Plan offloads parameters or requests deferred or speculative updates.
    """
    mode = plan.offload.update
    if facts.is_manual and plan.offload.parameters != "none":
        problem = "is not supported with manual optimization, in which gradients must stay on the device"
        action = "Offload only the optimizer states, or use automatic optimization"
        raise PlanError("offload.parameters", plan.offload.parameters, problem, action)
    if facts.is_manual:
        if mode in ("deferred", "speculative"):
            problem = "is not supported with manual optimization, in which training_step steps the optimizers"
            raise PlanError("offload.update", mode, problem, "Use 'plain', or use automatic optimization")
        return "plain"
    return update_mode(plan)


def _state_bytes(parameter: nn.Parameter, optimizer: Optimizer, group: dict[str, object]) -> int:
    own = local_part(parameter.detach())
    return state_bytes(optimizer, group, tuple(own.shape), parameter.dtype, tuple(parameter.shape))


def _closed(network: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with a module outside the block."""
    owners = _num_owners(network)
    return [block for block in blocks if all(num == owners[each] for each, num in _num_owners(block).items())]


def _num_owners(module: nn.Module) -> Counter[Tensor]:
    return Counter(each for part in module.modules() for each in part.parameters(recurse=False))
