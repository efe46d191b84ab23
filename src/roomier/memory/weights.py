"""The weights of a network as shapes, in the units that travel together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from roomier.parallel.shard import MULTIPLYING, units_of


@dataclass(frozen=True)
class Weight:
    """A parameter, without its values.

    Attributes:
        shape: of the whole of it.
        dtype: in which the optimizer updates it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered, reduced and freed together.

    Attributes:
        name: of the first module; empty for the root.
        gathered_dtype: in which they compute, and their gradients come.
        sum_dtype: in which gradients are added up.
        ends_late: its inputs have no gradient, so that its backward counts as over when all of it is.
    """

    name: str
    weights: tuple[Weight, ...]
    gathered_dtype: torch.dtype
    sum_dtype: torch.dtype
    is_root: bool = False
    ends_late: bool = False

    def gradient_bytes(self, num_elements: Callable[[Weight], int]) -> int:
        """Of the weights that are trained, in the dtype of each."""
        return sum(num_elements(each) * each.dtype.itemsize for each in self.weights if each.is_trained)


def units_with_weights(
    network: nn.Module, compute_dtype: torch.dtype | None = None, weight_dtype: torch.dtype | None = None
) -> list[Unit]:
    """The units of ``network``, cut already or not, in the order of its modules, the root first.

    Args:
        compute_dtype: of autocast; None for none.
        weight_dtype: to which floating-point weights will be converted; None leaves them.
    """
    names = {module: name for name, module in network.named_modules()}
    of_parameters: dict[nn.Parameter, str] = {}
    for name, parameter in network.named_parameters():
        of_parameters.setdefault(parameter, name)
    units: list[Unit] = []
    taken: set[nn.Parameter] = set()
    for modules, dtype in _travelling_together(network, compute_dtype):
        parameters = [each for module in modules for each in module.parameters() if each not in taken]
        unique = list(dict.fromkeys(parameters))
        if not unique:
            continue
        taken.update(unique)
        ends_late = all(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) for each in modules)
        weights = [_weight(each, of_parameters[each], weight_dtype) for each in unique]
        units.append(_unit(names[modules[0]], weights, dtype, ends_late=ends_late))
    rest = [_weight(each, name, weight_dtype) for each, name in of_parameters.items() if each not in taken]
    return [_unit("", rest, None, is_root=True), *units] if rest else units


def _weight(parameter: nn.Parameter, name: str, weight_dtype: torch.dtype | None) -> Weight:
    dtype = weight_dtype if weight_dtype is not None and parameter.is_floating_point() else parameter.dtype
    return Weight(name, tuple(parameter.shape), dtype, parameter.requires_grad)


def _unit(
    name: str,
    weights: list[Weight],
    compute_dtype: torch.dtype | None,
    *,
    is_root: bool = False,
    ends_late: bool = False,
) -> Unit:
    sum_dtype = torch.float64 if any(each.dtype is torch.float64 for each in weights) else torch.float32
    return Unit(name, tuple(weights), compute_dtype or weights[0].dtype, sum_dtype, is_root, ends_late)


def _travelling_together(
    network: nn.Module, compute_dtype: torch.dtype | None
) -> Iterator[tuple[list[nn.Module], torch.dtype | None]]:
    # See [Note: two dtypes in mixed precision] in parallel/shard.py.
    for unit in units_of(network):
        leaves = [each for each in unit.modules() if not any(True for _ in each.children())]
        exact = [each for each in leaves if not isinstance(each, MULTIPLYING) and any(True for _ in each.parameters())]
        if compute_dtype is None or exact == [unit]:
            yield [unit], None
            continue
        if exact:
            yield exact, None
        yield [unit], compute_dtype
