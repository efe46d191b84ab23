"""Constructs an engine from a Plan and a module. The comments explain the order in which techniques are applied."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeVar

from roomier.api.module import Module
from roomier.core import torch_fake
from roomier.core.ranks import Ranks
from roomier.engine.divide import divide
from roomier.engine.eager import EagerEngine
from roomier.engine.facts import Facts, check_module, facts_of
from roomier.engine.forward_levers import apply_levers
from roomier.engine.materialise import shards_parameters, take_weights
from roomier.engine.offload import filled_parameters, offloaded_shards, updates_of
from roomier.engine.optimizers import ConfigureOptimizers, check_optimizers, report_waiting_steps
from roomier.engine.weights_file import WeightsToRead
from roomier.plan import Plan
from roomier.techniques.adapters.lora import apply_lora, quantise_base, report_unnamed_adapters
from roomier.techniques.offload.parameters import OffloadedParameters
from roomier.techniques.offload.residency import Residency
from roomier.techniques.optim.configured import Configured

AnyEngine = TypeVar("AnyEngine", bound=EagerEngine)


def build(
    plan: Plan,
    module: Module,
    configure_optimizers: ConfigureOptimizers,
    engine_class: type[AnyEngine],
    ranks: Ranks,
    weights: WeightsToRead | None = None,
    facts: Facts | None = None,
) -> tuple[AnyEngine, Configured]:
    """Apply the techniques of ``plan`` to ``module`` in place, and return the engine that runs it.

    Args:
        configure_optimizers: function that creates the optimizers; it receives the blocks with their final parameters.
        engine_class: the class of the engine.
        ranks: the ranks across which the model and each batch are sharded.
        weights: file with the initial weights; None keeps the values of the module.
        facts: result of :func:`roomier.engine.facts.facts_of` for ``module``; computed if None. With context
            parallelism, blocks run on slices only if the facts contain a region.

    Raises:
        RoomierError: the device is not available, the optimizer cannot be created, ``weights`` does not match the
            module, or a tensor on ``meta`` receives no values.
    """
    facts = facts_of(plan, module, ranks) if facts is None else facts
    network, device, precision = facts.network, facts.device, facts.precision
    check_module(plan, module, network)
    report_unnamed_adapters(plan, network, facts.blocks)
    given = None if weights is None else weights.check(network)
    if plan.adapter.lora_rank is not None:
        apply_lora(network, facts.blocks, plan.adapter)  # adds adapters, which ``weights`` does not contain
    # Before all other techniques, so that no rank holds the full weights of a model that is sharded later.
    in_stages = facts.pipeline is not None
    taken = None if facts.is_staged else take_weights(network, plan, ranks, given=given, in_stages=in_stages)
    precision.convert_module(network)  # all later techniques depend on the dtype of the weights
    leaves = plan.offload.parameters != "none" and not torch_fake.makes_fake_tensors()
    parameters: OffloadedParameters | None = None
    if leaves and not shards_parameters(plan, ranks):
        parameters = filled_parameters(plan, facts, taken, weights)  # the device never holds all parameters
        taken = weights = None
    if taken is None:
        if not (
            facts.is_staged or torch_fake.makes_fake_tensors()
        ):  # fake tensors are on the device, and ``to`` cannot swap them
            module.to(device)  # before the optimizer, which creates its states on the device of the parameters
    elif not (in_stages or shards_parameters(plan, ranks)):
        taken.restore(network, network, device)  # DDP reads the parameters of the network that it wraps
    num_shares = plan.parallel.num_peers // plan.parallel.pipeline_parallel_size
    shares = num_shares if num_shares > 1 else None  # these peers compute the same loss
    levers = apply_levers(plan, facts, parameters)  # before sharding, whose hooks run outside these ``forward`` methods
    with ExitStack() as on_failure:
        on_failure.callback(levers.undo)
        parallel = divide(plan, facts, taken)  # replaces the parameters that it shards
        if taken is not None and parallel.runner is not None and shards_parameters(plan, ranks):
            taken.restore(parallel.runner, network, device)  # each rank allocates only its shards
        if weights is not None:
            weights.read_into(network)
        if plan.adapter.frozen_base != "as_is":
            quantise_base(network, plan.adapter)  # after the initial weights are loaded
        residency: Residency | None = parameters
        if leaves and parameters is None:
            residency = offloaded_shards(plan, facts)
            residency.install()
        configured = configure_optimizers(facts.blocks)  # last, because it needs the final parameters
        check_optimizers(plan, module, configured)
        engine = engine_class(
            facts,
            configured.optimizers,
            batch_plan=plan.batch,
            count_terms=module.num_loss_terms if module.loss_reduction == "mean" else shares,
            parallel=parallel,
            levers=levers,
            updates=updates_of(plan, facts, configured.optimizers, parallel, residency),
        )
        on_failure.pop_all()
    report_waiting_steps(facts, configured.optimizers)
    return engine, configured
