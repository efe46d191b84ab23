"""Compiled blocks: one graph per kind of block, the same results as without compilation, and restored forwards.

Most tests use a backend that only traces, which takes a second. One test uses the real compiler.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from roomier import Module, Trainer
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.engine.compile import CompiledForward, _report_uncompiled, compile_blocks
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.attention.watch import AttentionWatch
from tests.covering import few

CPU = torch.device("cpu")
TOKENS = torch.arange(32).view(2, 16) % 20
BATCH = {"input_ids": TOKENS, "targets": TOKENS}

Make = Callable[..., Trainer]

# Warnings of the compiler. As errors, these warnings would stop the compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


def make_gpt(num_layers: int, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=20, context=16, num_layers=num_layers, num_heads=2, width=16, dropout=dropout))


class Language(Module):
    def __init__(self, num_layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.gpt = make_gpt(num_layers, dropout)
        self.val_losses: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.gpt(**batch)[1]

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.val_losses.append(self.gpt(**batch)[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tiny(Module):
    """Two blocks that compile quickly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # With this parameter, the input of each block requires a gradient, so that all blocks have one kind of input.
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch * self.scale
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace blocks and create their autograd graphs, but generate no code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def weights_of(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def fitted(make_trainer: Make, num_layers: int = 2, **keywords: Any) -> Language:
    module = Language(num_layers)
    make_trainer(max_steps=3, **keywords).fit(module, [BATCH] * 3, [BATCH])
    return module


def test_compiled_code_computes_the_same(make_trainer: Make, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {}
    for compiles in (False, True):
        module = Tiny()
        make_trainer(compile=compiles, max_steps=3).fit(module, [torch.ones(2, 8)] * 3)
        weights[compiles] = weights_of(module)
    reported = [line for line in capsys.readouterr().err.splitlines() if "compiled the blocks" in line]
    assert len(reported) == 1, "one of two runs compiles"
    assert reported[0].startswith("roomier: compiled the blocks as 1 graph in ")
    assert float(reported[0].split()[-2]) > 0
    torch.testing.assert_close(weights[True], weights[False], rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights[True], weights_of(Tiny())), "it was trained"


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_training_and_evaluation_are_equal_to_an_uncompiled_run(make_trainer: Make) -> None:
    plain, compiled = fitted(make_trainer), fitted(make_trainer, compile=True)
    torch.testing.assert_close(weights_of(compiled), weights_of(plain), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack(compiled.val_losses), torch.stack(plain.val_losses), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("only_traced")
@pytest.mark.parametrize("recompute", few(["none", "full", "selective"]))
def test_equal_blocks_share_compiled_code(make_trainer: Make, recompute: str) -> None:
    for num_layers in (2, 6):
        before = torch_private.num_compiled_graphs()
        fitted(make_trainer, num_layers, compile=True, activation_checkpointing=recompute)
        assert torch_private.num_compiled_graphs() - before == 2  # training and evaluation


@pytest.mark.usefixtures("only_traced")
@pytest.mark.parametrize(
    "levers",
    few(
        [
            {"activation_checkpointing": "full"},
            {"activation_checkpointing": "selective"},
            {"offload": {"activations": "cpu"}},
            {"activation_checkpointing": "full", "offload": {"activations": "cpu"}, "chunked_loss": 4},
        ]
    ),
    ids=str,
)
def test_recomputation_is_compiled_with_the_block(make_trainer: Make, levers: dict[str, Any]) -> None:
    plain = fitted(make_trainer)
    compiled = fitted(make_trainer, compile=True, **levers)
    torch.testing.assert_close(weights_of(compiled), weights_of(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_dropout_is_identical_in_both_forwards_of_a_block(make_trainer: Make) -> None:
    weights = {}
    for recompute in ("none", "full"):
        module = Language(dropout=0.3)
        torch.manual_seed(1)
        make_trainer(compile=True, max_steps=2, activation_checkpointing=recompute).fit(module, [BATCH] * 2)
        weights[recompute] = weights_of(module)
    torch.testing.assert_close(weights["full"], weights["none"], rtol=1e-5, atol=1e-6)


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_the_attention_kernel_of_an_earlier_run_is_not_reused(make_trainer: Make) -> None:
    seen = []

    class Watching(Language):
        def training_step(self, batch: Any) -> torch.Tensor:
            with AttentionWatch(lambda report: seen.append({call.kernel for call in report.calls})):
                return super().training_step(batch)

    for kernel in ("flash", "math"):
        make_trainer(compile=True, attention=kernel, max_steps=1).fit(Watching(), [BATCH])
    assert seen[0] == {"flash"}
    assert "flash" not in seen[1]


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_blocks_run_uncompiled_after_the_run(make_trainer: Make) -> None:
    module = fitted(make_trainer, compile=True)
    assert all("forward" not in vars(block) for block in module.gpt.blocks)
    assert [name for name in module.state_dict() if "_orig_mod" in name] == []


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_a_copy_computes_with_its_own_weights() -> None:
    """Callbacks that average weights create such copies."""
    network = make_gpt(1)
    compile_blocks(network.blocks, CPU)
    hidden = torch.randn(2, 4, 16)
    before = network.blocks[0](hidden)
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(other.blocks[0](hidden), hidden)  # the residual branches have zero weights
    assert torch.equal(network.blocks[0](hidden), before)
    assert isinstance(vars(other.blocks[0])["forward"], CompiledForward)


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_a_custom_loop_has_compiled_blocks() -> None:
    network = make_gpt(3)
    plan = roomier.Plan.of({"compile": {"enabled": True}, "optimizer": {"name": "sgd", "lr": 0.1}})
    engine = roomier.prepare(network, plan=plan)
    before = torch_private.num_compiled_graphs()
    expected = make_gpt(3)(**BATCH)[1]
    loss = engine.forward_backward(lambda batch: network(**batch)[1], [BATCH])
    torch.testing.assert_close(loss, expected.detach())
    assert torch_private.num_compiled_graphs() - before == 1
    engine.close()


def test_a_model_without_blocks_is_rejected(make_trainer: Make) -> None:
    trainer = make_trainer(compile=True, optimizer="sgd", learning_rate=0.1, max_steps=1)
    with pytest.raises(RoomierError, match="compile=True: requires blocks") as error:
        trainer.fit(nn.Linear(2, 2), [torch.ones(2)])
    assert "model_blocks()" in error.value.action


def test_a_machine_without_a_compiler_is_rejected_before_the_first_step(make_trainer: Make) -> None:
    from torch._inductor import config

    module = Language()
    expected = pytest.raises(RoomierError, match="requires a C\\+\\+ compiler for cpu")
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), expected as error:
        make_trainer(compile=True, max_steps=1).fit(module, [BATCH])
    assert "compile=False" in error.value.action
    assert all("forward" not in vars(block) for block in module.gpt.blocks)


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_the_attention_kernel_of_compiled_blocks_is_reported(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Language()
    make_trainer(compile=True, max_steps=1, enable_model_summary=True).fit(module, [BATCH])
    err = capsys.readouterr().err
    assert "attention: flash, 2 calls per forward pass, [2, 2, 16, 8], float32" in err


@pytest.mark.more
@pytest.mark.usefixtures("only_traced")
def test_layers_of_hugging_face_with_a_cache_share_a_graph(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    _report_uncompiled.cache_clear()  # the notice is printed once per process
    weights, val_losses = {}, {}
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    before = torch_private.num_compiled_graphs()
    for compiles in (False, True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
        trainer = make_trainer(compile=compiles, optimizer="sgd", learning_rate=0.1, max_steps=2, max_epochs=1)
        batch = {"input_ids": TOKENS, "labels": TOKENS}
        trainer.fit(model, [batch] * 2, [batch])
        weights[compiles] = weights_of(model)
        val_losses[compiles] = trainer.callback_metrics["val_loss"]
    assert torch_private.num_compiled_graphs() - before == 1  # blocks with a cache are not compiled in evaluation
    assert capsys.readouterr().err.count("blocks with a key-value cache run uncompiled in evaluation") == 1
    torch.testing.assert_close(weights[True], weights[False], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(val_losses[True], val_losses[False], rtol=1e-5, atol=1e-6)
