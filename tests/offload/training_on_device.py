"""Training with parameters that leave a simulated accelerator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roomier.api.blocks import find_blocks
from roomier.core.log import quiet
from roomier.core.mesh import Mesh
from roomier.core.sharded import local_part
from roomier.core.torch_offload import groups_of
from roomier.core.world import World
from roomier.techniques.offload.parameters import OffloadedParameters
from roomier.techniques.offload.regions import regions_of
from roomier.techniques.offload.residency import UPDATE, Residency, record_sizes
from roomier.techniques.offload.shards import OffloadedShards, sharded_regions
from roomier.techniques.parallel.mesh import make_mesh
from roomier.techniques.parallel.shard import Sharding, Shards
from roomier.techniques.tiers.disk import DiskTier
from roomier.techniques.tiers.scratch import Scratch
from roomier.techniques.tiers.tier import HostTier, Tier
from tests.simulator import simulated
from tests.simulator.gpt import GPT, batches

NUM_STEPS = 4
Run = Callable[[Callable[[], Tensor]], Tensor]


@contextmanager
def tier_of(kind: str, sizes: Sequence[int]) -> Iterator[Tier]:
    """Return a tier in host memory or on disk."""
    if kind == "cpu":
        yield HostTier(sizes, pinned=True)
        return
    with tempfile.TemporaryDirectory() as folder, quiet():
        scratch = Scratch(folder)
        yield DiskTier(scratch, sizes, num_buffers=4, pinned=True)
        scratch.close()


def train(kind: str | None, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the losses and the final weights.

    Args:
        kind: tier of the parameters; None if they stay on the device.
        dtype: dtype of autocast.
    """
    torch.manual_seed(0)
    network = GPT(num_blocks=4).to(simulated.DEVICE)
    if kind is None:
        return [*_steps(network, None, dtype, lambda step: step()), *_weights(network)]
    blocks = find_blocks(network)
    regions = regions_of(network, blocks, 1, lambda module: False)
    with tier_of(kind, record_sizes(regions)) as tier:
        parameters = OffloadedParameters(network, blocks, regions, tier, torch.device(simulated.DEVICE))
        parameters.install()
        losses = _steps(network, parameters, dtype, lambda step: step(), forbids_waits=kind == "cpu")
        parameters.close()
    return [*losses, *_weights(network)]


def train_shards(kind: str | None, dtype: torch.dtype | None = None, *, updates_late: bool = False) -> list[Tensor]:
    """Return the losses and the final shards of this rank.

    Args:
        kind: tier of the parameters; None if they stay on the device.
        dtype: dtype of autocast.
        updates_late: True if parameters are also updated immediately before they are used.
    """
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size())
    torch.manual_seed(0)
    network = GPT(num_blocks=4).to(simulated.DEVICE)
    mesh = make_mesh(simulated.DEVICE, Mesh(world, shard=world.size))
    sharding = Sharding(
        mesh, frees_parameters=True, reduces_each_micro_batch=True, compute_dtype=dtype, is_pairwise=False
    )
    shards = Shards(network, sharding, find_blocks(network))
    shards.begin_run()
    if kind is None:
        return [*_steps(network, None, dtype, shards.runner, shards), *_weights(network)]
    groups = groups_of(network)
    regions = sharded_regions(groups)
    with tier_of(kind, record_sizes(regions)) as tier:
        parameters = OffloadedShards(network, groups, regions, tier, torch.device(simulated.DEVICE))
        parameters.install()
        if updates_late:
            for block in network.blocks:
                block.register_forward_pre_hook(partial(_update, parameters), prepend=True)
        losses = _steps(network, parameters, dtype, shards.runner, shards, forbids_waits=kind == "cpu")
        parameters.close()
    return [*losses, *_weights(network)]


@torch.no_grad()
def _update(parameters: Residency, block: nn.Module, *_: Any) -> None:
    own = list(block.parameters())
    region = parameters.region_of(own[0])
    assert region is not None
    parameters.use((region,), UPDATE)
    for each in own:
        local_part(each).mul_(0.9)
    parameters.changed(region)


def _steps(
    network: GPT,
    parameters: Residency | None,
    dtype: torch.dtype | None,
    run: Run,
    shards: Shards | None = None,
    *,
    forbids_waits: bool = False,
) -> list[Tensor]:
    """Train two micro-batches per step, and return the losses. From the third step on, the host must not wait for the
    device."""
    inside = {} if parameters is None else {each: region for region in parameters.regions for each in region.parameters}
    optimizers = {each: torch.optim.AdamW([each], lr=1e-2) for each in network.parameters()}
    losses = []
    for number, batch in enumerate(batches(NUM_STEPS)):
        with simulated.forbidden_host_waits() if forbids_waits and number >= 2 else nullcontext():
            tokens = batch.pin_memory().to(simulated.DEVICE, non_blocking=True)
            if parameters is not None:
                parameters.gradients.begin_step()
            for index, half in enumerate(tokens.chunk(2)):
                losses.append(_micro_batch(network, parameters, dtype, run, shards, half, index))
            for each, optimizer in optimizers.items():
                if parameters is not None and each in inside:
                    parameters.use((inside[each],), UPDATE)
                    parameters.gradients.arrive(inside[each])
                    optimizer.step()
                    parameters.changed(inside[each])
                    parameters.gradients.leave(inside[each])
                else:
                    optimizer.step()
                    optimizer.zero_grad()
            if parameters is not None:
                for region in parameters.regions:
                    parameters.gradients.forget(region)
                parameters.gradients.norms.clear()
            if shards is not None:
                shards.end_update()
    return [loss.cpu() for loss in losses]


def _micro_batch(
    network: GPT,
    parameters: Residency | None,
    dtype: torch.dtype | None,
    run: Run,
    shards: Shards | None,
    tokens: Tensor,
    index: int,
) -> Tensor:
    if shards is not None:
        shards.begin_micro_batch(is_first=index == 0, is_last=index == 1)
    with nullcontext() if dtype is None else torch.autocast(simulated.DEVICE, dtype):
        loss = run(lambda: network(tokens))
    if shards is not None:
        shards.begin_backward()
    loss.backward()
    if shards is not None:
        shards.end_backward()
    if parameters is not None:
        parameters.gradients.leave_complete()
    return loss.detach()


@torch.no_grad()
def _weights(network: GPT) -> list[Tensor]:
    return [local_part(each).cpu() for each in network.parameters()]


def compare(is_sharded: bool, kind: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the races, and the number of tensors that differ from training without a tier."""
    program = train_shards if is_sharded else train
    expected = program(None, dtype)
    simulated.clear()
    found = program(kind, dtype)
    races = simulated.races()
    differences = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return {"races": races, "differences": differences}
