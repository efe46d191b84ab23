"""Stages of a pipeline that run one after the other in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roomier.api.blocks import find_blocks
from roomier.core.device.events import Events, install_events
from roomier.techniques.pipeline.pipeline import find_pipeline
from roomier.techniques.pipeline.stage import PipelineStage
from roomier.techniques.pipeline.trace import Trace, parameters_without_values, trace_step
from roomier.techniques.pipeline.units import find_units

Step = Callable[[nn.Module, Any], Tensor]


def traced(network: nn.Module, step: Step, batch: Any) -> Trace:
    twin = copy.deepcopy(network, dict(parameters_without_values(network)))
    return trace_step(twin, find_units(twin, find_blocks(twin)), lambda: step(twin, batch))


def train(network: nn.Module, step: Step, batches: list[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and the sum of the gradients on one device."""
    network = copy.deepcopy(network)
    install_events(find_units(network, find_blocks(network)).values())
    events, losses = Events(0, torch.device("cpu")), []
    with events.window(0):
        for batch in batches:
            events.begin_micro_batch()
            loss = step(network, batch)
            loss.backward()
            losses.append(loss.detach())
    return losses, {name: each.grad for name, each in network.named_parameters() if each.grad is not None}


def run_stages(
    network: nn.Module, step: Step, batches: list[Any], num_stages: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and the sum of the gradients of all stages."""
    trace = traced(network, step, batches[0])
    pipeline = find_pipeline(network, find_blocks(network), trace, num_stages, "gpipe")
    owners = pipeline.owners(network, find_blocks(network))
    plans, stages, copies = [], [], []
    for number in range(num_stages):
        copied = copy.deepcopy(network)
        units = find_units(copied, find_blocks(copied))
        plans.append(pipeline.plan_of(trace, number))
        stages.append(PipelineStage(copied, units, torch.device("cpu")))
        install_events(units.values())
        for name, each in copied.named_parameters():
            if number not in owners[name]:
                with torch.no_grad():
                    torch.utils.swap_tensors(each, nn.Parameter(each.to("meta"), requires_grad=each.requires_grad))
        copies.append(copied)
    losses = []
    for number, batch in enumerate(batches):
        inputs: list[list[Tensor]] = []
        outputs: list[list[Tensor]] = []
        received: list[Tensor] = []
        for plan, stage, copied in zip(plans, stages, copies, strict=True):
            flags = [value in trace.with_gradients for value in plan.received]
            inputs.append(
                [each.detach().clone().requires_grad_(flag) for each, flag in zip(received, flags, strict=True)]
            )
            events = Events(0, torch.device("cpu"))
            with events.window(0):
                events.seed_generators(number)
                result = stage.forward(plan, partial(step, copied, batch), inputs[-1])
                outputs.append([result] if plan.is_last else result)
            received = outputs[-1]
        losses.append(outputs[-1][0].detach())
        gradients: list[Tensor] = [torch.ones_like(outputs[-1][0])]
        for given, made in zip(reversed(inputs), reversed(outputs), strict=True):
            pairs = [(a, b) for a, b in zip(made, gradients, strict=True) if b is not None]
            if pairs:
                torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
            gradients = [
                torch.zeros_like(each) if each.requires_grad and each.grad is None else each.grad for each in given
            ]
    total: dict[str, Tensor] = {}
    for copied in copies:
        for name, each in copied.named_parameters():
            if each.grad is not None:
                total[name] = total[name] + each.grad if name in total else each.grad
    return losses, total


def check_stages(network: nn.Module, step: Step, batches: list[Any], num_stages: int) -> None:
    """Check that losses are bit-identical to one device, and gradients up to the order of sums of shared weights."""
    losses, gradients = train(network, step, batches)
    of_stages, of_parameters = run_stages(network, step, batches, num_stages)
    assert [each.item() for each in of_stages] == [each.item() for each in losses]
    assert of_parameters.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_parameters[name], gradient, rtol=1e-14, atol=1e-16, msg=name)
