"""The loss of a training step, and the weight of each micro-batch in the loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from roomier.core.errors import TrainingError
from roomier.core.ranks import Ranks
from roomier.core.tree import nodes_of

# A function that counts the loss terms of a micro-batch or, if losses are summed over the samples, the number of ranks
# that compute the loss of the same samples, each of which contributes an equal share.
CountTerms = Callable[[Any], int | Tensor] | int


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in the output of a training step, or None if the step returned None.

    Raises:
        TrainingError: the loss is not a scalar tensor that depends on the parameters.
    """
    if not isinstance(output, Tensor):
        if output is None:
            return None
        output = _loss_in(output)
    loss: Tensor = output
    if loss.numel() != 1:
        action = "Reduce the loss, for example with loss.mean()"
        raise TrainingError("training_step", tuple(loss.shape), "the loss must be a scalar", action)
    if not loss.requires_grad:
        problem = "the loss must depend on a parameter that requires a gradient"
        action = "Do not detach the loss, and unfreeze at least one parameter"
        raise TrainingError("training_step", loss, problem, action)
    return loss


def _loss_in(output: object) -> Tensor:
    """Return the loss in ``output``, which is the output of a training step but not a tensor.

    Raises:
        TrainingError: the output contains no tensor at ``"loss"``.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        return loss
    problem = "must contain a tensor at 'loss'" if isinstance(output, Mapping) else "must return a tensor"
    raise TrainingError("training_step", output, problem, "Return the loss as a 0-dim tensor, or {'loss': loss}")


def complex_loss_error(loss: Tensor) -> TrainingError:
    """Return the error for a complex loss."""
    problem = "is complex, but only a real loss can be minimized"
    return TrainingError("loss", loss.detach(), problem, "Return a real loss, for example loss.abs()")


def term_weights(count_terms: CountTerms, batches: Sequence[Any], ranks: Ranks) -> tuple[float | Tensor, ...]:
    """Return, for each micro-batch, its number of loss terms divided by the total number in the global batch.

    Peers count the same terms, so the weights of those in the last stage add up to the weight of their samples.

    Args:
        count_terms: function that returns the number of loss terms of a micro-batch, as a number or a 0-dim tensor, or
            the number of ranks that compute the same loss.
        batches: micro-batches of this rank.
        ranks: ranks whose micro-batches form the global batch.

    Raises:
        TrainingError: a count is not a number, or no micro-batch has a loss term.
    """
    if isinstance(count_terms, int):
        return (1 / count_terms,) * len(batches)
    counts: list[Any] = [count_terms(batch) for batch in batches]
    # A number of the host can be compared with zero without synchronizing the device.
    counts = [count.item() if isinstance(count, Tensor) and count.is_cpu else count for count in counts]
    if not all(isinstance(count, (int, float, Tensor)) for count in counts):
        problem = "must return a number for each micro-batch"
        raise TrainingError("num_loss_terms", counts, problem, "Return an integer or a 0-dim tensor for each batch")
    total: Any = sum(counts)
    if not ranks.is_alone:
        on_device = isinstance(total, Tensor)
        total = ranks.sum(total if on_device else torch.tensor(float(total), dtype=torch.float64))
        total = total if on_device else total.item()
        if ranks.mesh.stage > 1:  # all stages count the same terms, and only the last one computes the loss
            counts = [count * ranks.mesh.stage for count in counts]
    if not isinstance(total, Tensor) and total <= 0:
        problem = "no micro-batch of this step has a loss term to average over"
        raise TrainingError("num_loss_terms", counts, problem, "Check whether all targets are ignored")
    return tuple(count / total for count in counts)


@contextmanager
def zero_gradients(loss: Tensor) -> Iterator[Tensor]:
    """Yield a zero loss in place of ``loss``, which is 0/0. Inside the context, the backward pass of the zero loss
    computes zero gradients.

    The backward pass must run, because other ranks wait for the gradients of this rank. Zero times the derivative of
    0/0 is NaN, so the gradient that enters each node of the graph is set to zero.

    Args:
        loss: the loss (0-dim) with its graph.
    """
    hooks = [node.register_prehook(lambda gradients: tuple(map(_zeros, gradients))) for node in nodes_of(loss)]
    try:
        yield torch.nan_to_num(loss) * 0.0
    finally:
        for hook in hooks:  # the nodes that accumulate gradients in parameters outlive the graph
            hook.remove()


def _zeros(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else torch.zeros_like(gradient)
