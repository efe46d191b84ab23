"""Search for the output layer of a model."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier import Trainer
from roomier.api.adapt import as_module
from roomier.api.blocks import find_blocks
from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.loss.chunked import find_output_layer


def output_layer(network: nn.Module) -> nn.Linear:
    return find_output_layer(network, find_blocks(network))


class Model(nn.Module):
    """Model with an embedding of 11 tokens and submodules by name."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        for name, part in parts.items():
            setattr(self, name, part)


class Naming(Model):
    def get_output_embeddings(self) -> nn.Module:
        return self.second


def two(first: int, second: int) -> dict[str, nn.Module]:
    return {"first": nn.Linear(4, first), "second": nn.Linear(4, second)}


def test_the_output_layer_is_found() -> None:
    gpt = GPT(GPTConfig.named("gpt-nano", vocab_size=11, context=4))
    assert output_layer(gpt) is gpt.head
    assert output_layer(as_module(gpt)) is gpt.head
    named = Naming(**two(11, 11))
    assert output_layer(named) is named.second
    assert output_layer(nn.ModuleDict({"part": named})) is named.second
    tied = Model(**two(11, 11))
    tied.first.weight = tied.tokens.weight
    assert output_layer(tied) is tied.first
    alike = Model(**two(11, 300))
    assert output_layer(alike) is alike.first
    last = Model(**two(7, 300))
    assert output_layer(last) is last.second


def test_layers_in_blocks_are_not_output_layers() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 11), nn.Linear(11, 4)) for _ in range(2))
    model = Model(blocks=blocks, head=nn.Linear(4, 11))
    assert output_layer(model) is model.head


class Own(nn.Linear):
    def forward(self, input):  # type: ignore[no-untyped-def]
        return super().forward(2 * input)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Model(**two(11, 11)), "first, second.*any of these"),
        (Model(**two(300, 7)), "first, second.*any of these"),
        (Model(), "no linear layer"),
        (Model(head=Own(4, 11)), "head, which computes the logits, is a Own"),
        (Naming(second=nn.Conv1d(4, 11, 1)), "second, which computes the logits, is a Conv1d"),
    ],
)
def test_a_missing_or_ambiguous_output_layer_is_rejected(model: nn.Module, problem: str) -> None:
    with pytest.raises(RoomierError, match=problem):
        output_layer(model)


def test_an_output_layer_with_an_adapter_is_rejected(make_trainer: Callable[..., Trainer]) -> None:
    gpt = GPT(GPTConfig.named("gpt-nano", vocab_size=11, context=4))
    trainer = make_trainer(chunked_loss=True, lora={"rank": 2, "targets": "head"}, max_steps=1, optimizer="sgd")
    with pytest.raises(RoomierError, match="with another forward method"):
        trainer.fit(gpt, [])


class Squared(nn.Module):
    """Model whose only linear layer is not the output layer of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(x), y)


class Classes(Squared):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize(
    ("network", "target", "is_reported"),
    [(Squared(), torch.zeros(5, 7), True), (Classes(), torch.zeros(5).long(), False)],
)
def test_a_loss_that_is_not_chunked_is_reported_after_the_first_step(
    make_trainer: Callable[..., Trainer],
    capfd: pytest.CaptureFixture[str],
    network: nn.Module,
    target: Tensor,
    is_reported: bool,
) -> None:
    trainer = make_trainer(chunked_loss=True, optimizer="sgd", learning_rate=0.1, max_steps=3)
    trainer.fit(network, [(torch.ones(5, 4), target)] * 3)
    assert capfd.readouterr().err.count("chunked loss: no memory is saved") == is_reported
