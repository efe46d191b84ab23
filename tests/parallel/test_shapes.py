"""Tests that under every strategy, unchanged models of many structures train as in one process."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.techniques.precision.lstm import onednn_has_lstm
from tests.covering import covering, few
from tests.parallel.parity import Batch, Setup, Task, Trained, distance, train_bare, train_on_ranks
from tests.parallel.tasks import Language
from tests.ranks.pool import RankPool

WIDTH = 6


class Regression(Task):
    """Module that predicts a number for each sample of ``x [B, T, WIDTH]``."""

    num_tokens = 3

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        x = torch.randn(num_samples, self.num_tokens, WIDTH, generator=generator)
        return {"x": x, "y": x.mean(dim=(1, 2)).sin()[:, None]}

    def count_terms(self, batch: Batch) -> int:
        return len(batch["y"])

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.predict(batch["x"]), batch["y"])

    def predict(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x)
        return prediction


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class FrozenSome(Language):
    """A GPT whose token embedding and biases are frozen."""

    def make_network(self) -> nn.Module:
        network = super().make_network()
        for name, each in network.named_parameters():
            each.requires_grad_("tokens" not in name and "bias" not in name)
        return network


class FrozenBlock(Language):
    """A GPT whose embeddings and first block are frozen, as in fine-tuning."""

    def make_network(self) -> nn.Module:
        network = super().make_network()
        for module in (network.tokens, network.positions, network.blocks[0]):
            module.requires_grad_(False)
        return network


class Uneven(Regression):
    """Module with parameters whose first dimensions are 1, 3 and 5."""

    def make_network(self) -> nn.Module:
        mlp = [nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)]
        return nn.Sequential(Residual(), Residual(), Mean(), *mlp)


class UsedTwice(Regression):
    """Module that runs each block twice per step."""

    def make_network(self) -> nn.Module:
        return nn.ModuleDict(
            {"blocks": nn.ModuleList([Residual(), Residual()]), "head": nn.Linear(WIDTH, 1)},
        )

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.ModuleDict)
        for _ in range(2):
            for block in self.network["blocks"]:
                x = block(x)
        prediction: Tensor = self.network["head"](x.mean(dim=1))
        return prediction


class RegisteredTwice(Regression):
    """Module that registers one block twice in a Sequential, as ALBERT shares its layers."""

    def make_network(self) -> nn.Module:
        shared, other = Residual(), Residual()
        return nn.Sequential(shared, other, shared, Mean(), nn.Linear(WIDTH, 1))


class Unused(Regression):
    """Module that contains a block, and a layer outside the blocks, that no step uses."""

    def make_network(self) -> nn.Module:
        network = nn.Sequential(Residual(), Residual(), Mean(), nn.Linear(WIDTH, 1))
        network.spare_block = Residual()
        network.spare = nn.Linear(WIDTH, WIDTH)
        return network

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.Sequential)
        for layer in self.network[:4]:
            x = layer(x)
        return x


class Bare(Regression):
    """Root module with parameters, one of which has a single element, and with a buffer that the forward uses."""

    def make_network(self) -> nn.Module:
        network = nn.Sequential(Residual(), Residual(), Mean(), nn.Linear(WIDTH, 1))
        network.scale = nn.Parameter(torch.ones(1))
        network.shift = nn.Parameter(torch.zeros(1, WIDTH))
        network.register_buffer("mask", torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
        return network

    def predict(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x * self.network.mask + self.network.shift) * self.network.scale
        return prediction


class Attention(Regression):
    """The attention of torch, which reads the weights of submodules without calling the submodules."""

    def make_network(self) -> nn.Module:
        layers = [
            nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=8, dropout=0.0, batch_first=True)
            for _ in range(2)
        ]
        return nn.ModuleDict(
            {
                "encoder": nn.Sequential(*layers),
                "attention": nn.MultiheadAttention(WIDTH, 3, batch_first=True),
                "head": nn.Linear(WIDTH, 1),
            }
        )

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.ModuleDict)
        x = self.network["encoder"](x)
        x = x + self.network["attention"](x, x, x)[0]
        prediction: Tensor = self.network["head"](x.mean(dim=1))
        return prediction


class Recurrent(Regression):
    """An LSTM and a GRU, which store lists of their weights, and a GRU cell."""

    def make_network(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "lstm": nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True),
                "gru": nn.GRU(5, 7, batch_first=True),
                "cell": nn.GRUCell(7, 4),
                "head": nn.Linear(4, 1),
            }
        )

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.ModuleDict)
        x = self.network["gru"](self.network["lstm"](x)[0])[0]
        prediction: Tensor = self.network["head"](self.network["cell"](x[:, -1]))
        return prediction


class Convolutions(Regression):
    """Convolutions of one to three dimensions, a transposed convolution and a group norm."""

    def make_network(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(2, (1, WIDTH)),
            nn.Conv2d(self.num_tokens, 5, kernel_size=1),
            nn.GroupNorm(1, 5),
            nn.ReLU(),
            nn.ConvTranspose2d(5, 3, kernel_size=1),
            nn.Flatten(2),
            nn.Conv1d(3, 4, kernel_size=3, padding=1),
            nn.Unflatten(1, (4, 1, 1)),
            nn.Conv3d(4, 2, kernel_size=1),
            nn.Flatten(1),
            nn.Linear(2 * WIDTH, 1),
        )


class Normed(Regression):
    """A layer whose weight is computed from other parameters before each forward."""

    def make_network(self) -> nn.Module:
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(Residual(), Residual(), normed, Mean(), nn.Linear(WIDTH, 1))


class InPlace(Regression):
    """Module that adds in place to the output of a linear layer, which is a view if its input has more than two
    dimensions."""

    def make_network(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "wide": nn.Linear(WIDTH, 8),
                "head": nn.Linear(8, 1),
            }
        )

    def predict(self, x: Tensor) -> Tensor:
        assert isinstance(self.network, nn.ModuleDict)
        z = self.network["wide"](x)
        z += 1.0
        prediction: Tensor = self.network["head"](z.mean(dim=1))
        return prediction


class AloneInRoot(Regression):
    """A network with a single layer."""

    def make_network(self) -> nn.Module:
        return nn.Linear(WIDTH, 1)

    def predict(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x.mean(dim=1))
        return prediction


class ChannelsLast(Regression):
    """Module with weights in channels_last and transposed memory formats."""

    def make_network(self) -> nn.Module:
        layers = [nn.Unflatten(2, (WIDTH, 1)), nn.Conv2d(self.num_tokens, 5, kernel_size=(3, 1)), nn.Flatten(1)]
        network = nn.Sequential(*layers, nn.Linear(5 * (WIDTH - 2), 1)).to(memory_format=torch.channels_last)
        network[3].weight = nn.Parameter(torch.randn(5 * (WIDTH - 2), 2).t()[:1].mul(0.1))
        network.transposed = nn.Parameter(torch.randn(WIDTH, self.num_tokens).t())
        return network

    def predict(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x * self.network.transposed)
        return prediction


TASKS = [
    FrozenSome,
    FrozenBlock,
    Uneven,
    UsedTwice,
    RegisteredTwice,
    Unused,
    Bare,
    Attention,
    Recurrent,
    Convolutions,
    Normed,
    InPlace,
    AloneInRoot,
    ChannelsLast,
]
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


def check_structures(on_ranks: RankPool, tasks: list[type[Task]], strategy: str, num_ranks: int = 2) -> None:
    setup = Setup(strategy, num_ranks, accumulate=2, clip=0.5, num_steps=4)
    results = on_ranks.each(num_ranks, train_on_ranks, [(task, setup) for task in tasks])
    for task, [trained, *_] in zip(tasks, results, strict=True):
        apart = distance(trained, train_bare(task, setup))
        assert max(apart.losses, apart.norms, apart.weights) < 1e-5, (task.__name__, apart)


@pytest.mark.parametrize("strategy", few(STRATEGIES))
def test_structures_match_one_process(on_ranks: RankPool, strategy: str) -> None:
    """Each structure trains under two strategies."""
    chosen = covering(TASKS, STRATEGIES, per_row=2)
    tasks = [each.values[0] for each in chosen if each.values[1] == strategy and not each.marks]
    assert len(tasks) == len(TASKS) // 2
    check_structures(on_ranks, tasks, strategy)


def test_ranks_without_rows_match_one_process(on_ranks: RankPool) -> None:
    check_structures(on_ranks, [Uneven, Unused], "zero3", num_ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_ranks"), [*((each, 2) for each in STRATEGIES), ("zero3", 4)])
def test_every_structure_matches_one_process(on_ranks: RankPool, strategy: str, num_ranks: int) -> None:
    check_structures(on_ranks, TASKS, strategy, num_ranks)


# As a unit, attention receives three separate inputs. One matrix product in bf16 becomes three, each of which is
# rounded.
BF16_TOLERANCES = {Attention: 2**-8, Recurrent: 1e-5, Convolutions: 1e-5, UsedTwice: 1e-5}


@pytest.mark.more
def test_structures_in_bf16_match_one_process(on_ranks: RankPool) -> None:
    """The test uses a single step, because later steps amplify rounding errors. See ``test_equivalence.py``."""
    setup = Setup("zero3", 2, accumulate=2, precision="bf16-mixed", num_steps=1)
    results = on_ranks.each(2, train_on_ranks, [(task, setup) for task in BF16_TOLERANCES])
    for (task, tolerance), [trained, *_] in zip(BF16_TOLERANCES.items(), results, strict=True):
        with pytest.MonkeyPatch.context() as patched:
            if task is Recurrent and not onednn_has_lstm(torch.bfloat16):
                # otherwise torch raises an error in the bare loop
                patched.setattr(torch.backends.mkldnn, "enabled", False)
            apart = distance(trained, train_bare(task, setup, in_parts=True))
        assert apart.losses < 1e-5, (task.__name__, apart)
        assert apart.weights < tolerance, (task.__name__, apart)


class Dropped(Language):
    dropout = 0.3


@pytest.mark.more
def test_dropout_is_identical_under_every_strategy(on_ranks: RankPool) -> None:
    setup = Setup("ddp", 2, accumulate=2, num_steps=4)
    calls = [(Dropped, replace(setup, strategy=strategy)) for strategy in STRATEGIES]
    [expected, *_], *results = on_ranks.each(2, train_on_ranks, calls)
    for strategy, [trained, *_] in zip(STRATEGIES[1:], results, strict=True):
        apart = distance(trained, expected)
        assert max(apart.losses, apart.weights) < 1e-5, (strategy, apart)


class BatchNormed(Regression):
    """Linear layers before a norm have no bias, because its exact gradient is 0 and Adam amplifies rounding errors."""

    def make_network(self) -> nn.Module:
        return nn.Sequential(
            Mean(),
            nn.Linear(WIDTH, 5, bias=False),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Linear(5, 4, bias=False),
            nn.BatchNorm1d(4),
            nn.Linear(4, 1),
        )


def train_and_show_buffers(task: type[Task], setup: Setup) -> tuple[Trained, dict[str, Tensor]]:
    made: list[Task] = []

    def make() -> Task:
        made.append(task())
        return made[-1]

    trained = train_on_ranks(make, setup)
    return trained, {name: each.clone() for name, each in made[0].named_buffers()}


@pytest.mark.parametrize("strategy", few(["ddp", "zero2", "zero3"]))
def test_batch_norm_uses_the_micro_batch_of_each_rank(on_ranks: RankPool, strategy: str) -> None:
    """The results match a plain loop over the same micro-batches. Running statistics differ between ranks."""
    setup = Setup(strategy, 2, micro_batch=4, num_steps=4)
    results = on_ranks(2, train_and_show_buffers, BatchNormed, setup)
    apart = distance(results[0][0], train_bare(BatchNormed, setup, in_parts=True))
    assert max(apart.losses, apart.weights) < 1e-5, apart
    (_, ours), (_, others) = results
    assert int(ours["network.2.num_batches_tracked"]) == setup.num_steps
    assert not torch.equal(ours["network.2.running_mean"], others["network.2.running_mean"])
