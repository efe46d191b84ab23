"""Tests of layers after the last block, such as a final norm."""

import pytest
from torch import Tensor, nn

from tests.context.fitting import Case
from tests.context.networks import WIDTH, Later
from tests.context.test_equivalence import check
from tests.context.test_rejections import examine
from tests.ranks.pool import RankPool


class Convolution(nn.Module):
    """A convolution over time of hidden states of shape (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return y


def gathered_from(network: nn.Module) -> str:
    """Return the name of the layer whose output is gathered."""
    [name] = [block.name.removeprefix("network.") for block in examine("encoder", network).blocks if block.gathered]
    return name


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (Later(), "norm"),
        (Later(nn.Linear(WIDTH, WIDTH), nn.GELU()), "later.1"),
        (
            Later(reads=lambda network, x, y: x[:, 0].square().mean()),
            "layers.1",
        ),  # another reader of the last block's output
        (Later(reads=lambda network, x, y: y.square().mean()), "norm"),
        (Later(Convolution(), nn.GELU()), "norm"),
        (Later(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)), "norm"),  # the gather would be larger
        (Later(nn.Dropout(0.1)), "norm"),
    ],
    ids=["norm", "several", "last block", "output", "convolution", "wide", "dropout"],
)
def test_position_wise_layers_after_the_last_block_run_on_slices(network: nn.Module, expected: str) -> None:
    assert gathered_from(network) == expected


def test_a_layer_that_is_called_twice_runs_on_the_full_sequence() -> None:
    assert gathered_from(Later(reads=lambda network, x, y: network.norm(y).mean())) == "layers.1"


@pytest.mark.more
def test_later_layers_match_one_process(on_ranks: RankPool) -> None:
    for levers in {}, {"chunked_loss": 5}:
        check(on_ranks, Case("later", "zero3", 4, 4, num_steps=3, levers=levers))
