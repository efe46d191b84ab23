"""Blocks with state or several arguments, and calls outside of training steps."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.techniques.activation import recompute, repeat, selective
from roomier.techniques.activation.block_forward import BlockForward
from roomier.techniques.activation.copies import Offload
from tests.activation.kinds import DROPOUT, TOKENS, make_gpt
from tests.activation.steps import WAYS, assert_equal, recomputed, step_of
from tests.hugging_face.small import small

pytestmark = pytest.mark.more

X = torch.linspace(-1, 1, 4 * 8).sin().view(4, 8)
every_way = pytest.mark.parametrize("way", WAYS, ids="-".join)


class Block(nn.Module):
    """Layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.dropout = nn.Dropout(DROPOUT)
        self.down = nn.Linear(16, 8)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + self.down(self.dropout(F.gelu(self.up(x))))


class Net(nn.Module):
    """Sequence of blocks."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))

    def model_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self) -> Tensor:
        return self(X).square().mean()


def assert_same(make_net: Callable[[], Any], way: tuple[str, str], num_steps: int = 2) -> None:
    """Check that the steps of a network with ``way`` equal the steps without it."""
    plain, ours = make_net(), make_net()
    with recomputed(ours, *way):
        for _ in range(num_steps):
            assert_equal(step_of(ours, ours.loss), step_of(plain, plain.loss))


@pytest.fixture(autouse=True)
def moves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "Offload", partial(Offload, min_bytes=1))


@pytest.mark.parametrize(("policy", "calls"), [("full", [2, 2, 2, 2]), ("every_n", [1, 2, 1, 2]), ("none", [1] * 4)])
def test_the_policy_determines_the_recomputed_blocks(policy: str, calls: list[int]) -> None:
    net = Net()
    with recomputed(net, policy, "cpu"):
        step_of(net, net.loss)
    assert [block.num_calls for block in net.blocks] == calls


def test_selective_recomputes_everything_except_products() -> None:
    def count(policy: str) -> tuple[int, int]:
        operators: list[Any] = []

        def note(operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
            operators.append(operator)
            return operator(*args, **kwargs)

        network, loss = make_gpt()
        with recomputed(network, policy), torch_private.intercept(note):
            step_of(network, loss)
        return operators.count(torch.ops.aten.addmm.default), operators.count(torch.ops.aten.gelu.default)

    assert count("none") == (16, 4)
    assert count("selective") == (16, 8)
    assert count("full") == (32, 8)


def test_evaluation_calls_the_block_directly() -> None:
    net = Net()
    with recomputed(net, "full", "cpu"):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert not net(X).requires_grad
        net.loss()
        assert [block.num_calls for block in net.blocks] == [3] * 4
        assert all(isinstance(block.forward, BlockForward) for block in net.blocks)
    assert not any(isinstance(block.forward, BlockForward) for block in net.blocks)


@every_way
def test_eval_mode_with_gradients(way: tuple[str, str]) -> None:
    assert_same(lambda: Net().eval(), way)


@every_way
def test_a_block_that_is_called_twice(way: tuple[str, str]) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    assert_same(Twice, way)


@every_way
def test_frozen_blocks_and_inputs_without_gradient(way: tuple[str, str]) -> None:
    def make() -> Net:
        net = Net()
        net.first.requires_grad_(False)
        net.blocks[0].requires_grad_(False)
        net.blocks[2].requires_grad_(False)
        return net

    assert_same(make, way)


@every_way
def test_tied_weights(way: tuple[str, str]) -> None:
    def make() -> Net:
        net = Net()
        for block in net.blocks[1:]:
            block.up.weight = net.blocks[0].up.weight
        return net

    assert_same(make, way)


@every_way
def test_a_block_that_disables_autocast_for_some_operations(way: tuple[str, str]) -> None:
    class Mixed(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = x.float() + self.up(x.float()).mean()
            return super().forward(x)

    class MixedNet(Net):
        def loss(self) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().loss()

    assert_same(lambda: MixedNet(Mixed), way)


@every_way
def test_a_graph_that_is_retained_for_a_second_backward(way: tuple[str, str]) -> None:
    def gradients(net: Net) -> list[Tensor]:
        torch.manual_seed(3)
        loss = net.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        return [each.grad for each in net.parameters()]

    plain, ours = Net(), Net()
    with recomputed(ours, *way):
        assert all(torch.equal(one, other) for one, other in zip(gradients(ours), gradients(plain), strict=True))


@every_way
def test_random_numbers_of_python_and_numpy_are_repeated(way: tuple[str, str]) -> None:
    class Drawing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (random.random() + float(np.random.rand()))

    class Seeded(Net):
        def loss(self) -> Tensor:
            random.seed(5)
            np.random.seed(5)
            return super().loss()

    assert_same(lambda: Seeded(Drawing), way)
    ends = []
    for policy in ("none", "full"):
        net = Seeded(Drawing)
        with recomputed(net, policy):
            step_of(net, net.loss)
        ends.append((random.random(), float(np.random.rand())))
    assert ends[0] == ends[1]


@every_way
def test_buffers_that_a_forward_reads_and_changes(way: tuple[str, str]) -> None:
    """Spectral norm continues its power iteration in each forward, and batch norm counts batches."""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.utils.parametrizations.spectral_norm(self.up)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    assert_same(lambda: Net(Normed), way)


def test_a_buffer_that_changes_later_is_rejected() -> None:
    class Late(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.num_calls >= 2:
                self.total += 1
            return super().forward(x + self.total)

    net = Net(Late)
    with recomputed(net, "full"):
        step_of(net, net.loss)
        with pytest.raises(
            RoomierError, match="activation_checkpointing='total': is a buffer that the first forward pass of Late did"
        ):
            step_of(net, net.loss)


def test_batch_norm_that_is_frozen_at_first() -> None:
    net = Net(lambda: nn.Sequential(Block(), nn.BatchNorm1d(8)))
    with recomputed(net, "full"):
        net.blocks.eval()
        step_of(net, net.loss)
        net.blocks.train()
        step_of(net, net.loss)
    assert [int(block[1].num_batches_tracked) for block in net.blocks] == [1] * 4


def test_random_numbers_after_saved_attention_are_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention kernels draw random numbers for dropout, which later random numbers must not repeat."""

    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.rand_like(x))

    monkeypatch.setattr(selective, "ATTENTION", {torch.ops.aten.rand_like.default})
    assert_same(lambda: Net(Noisy), ("selective", "none"))
    assert_same(lambda: Net(Noisy), ("selective", "cpu"))


def test_copies_of_a_network_run_their_own_blocks() -> None:
    net = Net()
    with recomputed(net, "full", "cpu"):
        step_of(net, net.loss)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert other.blocks[0].forward.module is other.blocks[0]
            before = net.blocks[0].num_calls
            ours = step_of(other, other.loss)
            assert net.blocks[0].num_calls == before
            assert_equal(ours, step_of(net, net.loss))
    assert net.state_dict().keys() == Net().state_dict().keys()


def test_a_network_without_blocks_is_rejected() -> None:
    for policy, offload, field in (("full", "none", "activation_checkpointing='full'"), ("none", "cpu", "offload")):
        with pytest.raises(RoomierError, match=field + r".*no blocks.*model_blocks\(\)"):
            recomputed(nn.Linear(2, 2), policy, offload).__enter__()


def test_every_n_larger_than_the_number_of_blocks() -> None:
    with pytest.raises(RoomierError, match=r"every_n=2: must be at most the number of blocks of the model \(1\)"):
        recomputed(Net(num_blocks=1), "every_n").__enter__()


def make_gpt2() -> tuple[nn.Module, Callable[..., Any]]:
    torch.manual_seed(0)
    network = small("GPT2LMHeadModel", num_hidden_layers=3, dropout=0.1).train()
    return network, partial(network, input_ids=TOKENS, labels=TOKENS)


@every_way
def test_an_empty_cache_is_replaced_in_training(way: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    repeat._PRINTED.clear()
    (plain, plain_call), (ours, our_call) = make_gpt2(), make_gpt2()
    with recomputed(ours, *way):
        ours_step = step_of(ours, lambda: our_call(use_cache=True).loss)
        assert capsys.readouterr().err.count("use_cache=True has no effect in training") == 1
        with torch.no_grad():
            assert our_call(use_cache=True).past_key_values.get_seq_length() == TOKENS.shape[1]
    assert_equal(ours_step, step_of(plain, lambda: plain_call(use_cache=False).loss))


def test_a_filled_cache_is_rejected() -> None:
    network, call = make_gpt2()
    with recomputed(network, "full"):
        with torch.no_grad():
            cache = network(input_ids=TOKENS[:, :3], use_cache=True).past_key_values
        with pytest.raises(RoomierError, match="past_key_values='DynamicCache'"):
            call(past_key_values=cache)
