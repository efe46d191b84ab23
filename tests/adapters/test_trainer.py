"""Adapters and quantized frozen weights in complete runs: weights, resume, evaluation, loading and saving."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from roomier import Module, Trainer
from roomier.callbacks.model_summary import summarize
from roomier.core.errors import CheckpointError, RoomierError
from roomier.techniques.adapters.layers import Adapted, InFewBits, is_adapter
from roomier.techniques.adapters.lora import adapter_state, merge_lora
from tests.adapters.models import Adaptable, loss_of, make_gpt, token_batches
from tests.covering import few

MakeTrainer = Callable[..., Trainer]
OPTIMIZER = {"name": "adamw", "lr": 1e-2}
BASES = ["as_is", "int8", "nf4"]


def lora(base: str = "as_is", **settings: Any) -> dict[str, Any]:
    return {"rank": 4, "base": base, **settings}


def states_equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("precision", few(["32-true", "bf16-mixed", "bf16-true"]))
def test_the_loss_decreases_and_only_adapters_change(make_trainer: MakeTrainer, base: str, precision: str) -> None:
    module = Adaptable()
    batches = token_batches(8, batch_size=8)

    def loss() -> float:
        with torch.no_grad():
            return sum(float(loss_of(module.net, each)) for each in batches)

    before = loss()
    trainer = make_trainer(lora=lora(base), optimizer={**OPTIMIZER, "lr": 3e-2}, precision=precision, max_epochs=5)
    trainer.fit(module, batches)
    frozen = {name: each for name, each in module.named_parameters() if not is_adapter(name)}
    assert loss() < before - 1
    assert all(each.grad is None and not each.requires_grad for each in frozen.values())
    held = {parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"]}
    assert held == set(dict(module.named_parameters()).values()) - set(frozen.values())
    assert any(isinstance(each, InFewBits) for each in module.modules()) == (base != "as_is")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_resume_is_bit_identical(make_trainer: MakeTrainer, tmp_path: Path, base: str, precision: str) -> None:
    batches = token_batches(6)
    settings = {
        "lora": lora(base, dropout=0.1),
        "optimizer": OPTIMIZER,
        "precision": precision,
        "enable_checkpointing": True,
    }
    whole = Adaptable()
    torch.manual_seed(3)
    make_trainer(**settings, max_steps=6).fit(whole, batches)
    first = Adaptable()
    torch.manual_seed(3)
    trainer = make_trainer(**settings, max_steps=3)
    trainer.fit(first, batches)
    trainer.save_checkpoint(tmp_path / "half")
    torch.manual_seed(99)
    resumed = Adaptable()
    make_trainer(**settings, max_steps=6).fit(resumed, batches, ckpt_path=tmp_path / "half")
    assert states_equal(resumed, whole)


@pytest.mark.parametrize("base", BASES)
def test_evaluation_after_a_fit_and_from_a_checkpoint(make_trainer: MakeTrainer, tmp_path: Path, base: str) -> None:
    module, batches = Adaptable(), token_batches(3)
    trainer = make_trainer(lora=lora(base), optimizer=OPTIMIZER, max_steps=3, enable_checkpointing=True)
    trainer.fit(module, batches)
    trainer.save_checkpoint(tmp_path / "saved")
    expected = torch.stack([loss_of(module.net, each).detach() for each in batches])
    assert trainer.validate(module, batches)[0]["val_loss"] == pytest.approx(float(expected.mean()))
    assert torch.allclose(torch.stack(trainer.predict(module, batches)), expected)
    trainer.fit(module, batches)  # a second fit continues with the same adapters
    other = Adaptable()
    trained = make_trainer(lora=lora(base)).validate(other, batches, ckpt_path=tmp_path / "saved")
    assert trained[0]["val_loss"] == pytest.approx(float(expected.mean()))
    plain = make_trainer().validate(other, batches)  # without the keyword, because the adapters are part of the model
    assert plain[0]["val_loss"] == pytest.approx(float(expected.mean()))


@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_loads_as_a_module_with_adapters(make_trainer: MakeTrainer, tmp_path: Path, base: str) -> None:
    module, batches = Adaptable(), token_batches(3)
    trainer = make_trainer(lora=lora(base, alpha=8), optimizer=OPTIMIZER, max_steps=3, enable_checkpointing=True)
    trainer.fit(module, batches)
    trainer.save_checkpoint(tmp_path / "saved")
    loaded = Adaptable.load_from_checkpoint(tmp_path / "saved")
    assert states_equal(loaded, module)
    expected = loss_of(module.net, batches[0])
    assert torch.equal(loss_of(loaded.net, batches[0]), expected)
    merge_lora(loaded)
    assert not any(isinstance(each, Adapted) for each in loaded.modules())
    torch.testing.assert_close(loss_of(loaded.net, batches[0]), expected, rtol=1e-5, atol=1e-6)


def plain_file(folder: Path) -> tuple[Path, nn.Module]:
    torch.manual_seed(5)
    plain = make_gpt()
    with torch.no_grad():
        for each in plain.parameters():
            each.add_(0.01)
    save_file(plain.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors", plain


class OnMeta(Adaptable):
    def __init__(self) -> None:
        Module.__init__(self)
        with torch.device("meta"):
            self.net = make_gpt()


class Configured(Adaptable):
    def __init__(self) -> None:
        Module.__init__(self)
        self.net: nn.Module | None = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = make_gpt()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", [Adaptable, OnMeta, Configured])
def test_weights_of_the_plain_model(
    make_trainer: MakeTrainer, tmp_path: Path, base: str, kind: type[Adaptable]
) -> None:
    path, plain = plain_file(tmp_path)
    module, batches = kind(), token_batches(1)
    trainer = make_trainer(lora=lora(base), optimizer={**OPTIMIZER, "lr": 1e-12}, max_steps=1)
    trainer.fit(module, batches, weights=path)
    now = module.net.state_dict()
    assert all(torch.equal(now[name], each) for name, each in plain.state_dict().items() if name in now)
    assert all(each.abs().sum() > 0 for name, each in now.items() if name.endswith("lora_A"))
    assert all(each.abs().max() < 1e-6 for name, each in now.items() if name.endswith("lora_B"))
    rounding = {"as_is": 1e-6, "int8": 1e-3, "nf4": 2e-2}[base]
    losses = [loss_of(each, batches[0]).item() for each in (module.net, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=rounding)


def test_only_adapters_may_be_missing_in_a_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path, plain = plain_file(tmp_path)
    module = Adaptable()
    trainer = make_trainer(lora=lora(), optimizer=OPTIMIZER, max_steps=1)
    trainer.fit(module, token_batches(1))
    trainer.fit(module, token_batches(1), weights=path)  # the adapters are added before the file is read
    state = plain.state_dict()
    del state["blocks.0.attention.out.bias"]
    save_file(state, tmp_path / "partial.safetensors")
    with pytest.raises(RoomierError, match=r"missing: net\.blocks\.0\.attention\.out\.bias"):
        trainer.fit(module, token_batches(1), weights=tmp_path / "partial.safetensors")


@pytest.mark.parametrize("base", BASES)
def test_a_meta_model_without_a_file_gets_its_initial_values(make_trainer: MakeTrainer, base: str) -> None:
    module = OnMeta()
    make_trainer(lora=lora(base), optimizer=OPTIMIZER, max_steps=2).fit(module, token_batches(2))
    assert all(torch.isfinite(each).all() for each in module.parameters())
    layer = module.net.get_submodule("blocks.0.attention.out")
    assert isinstance(layer, Adapted)
    assert 0 < float(layer.weight.detach().std()) < 0.5  # type: ignore[operator]


def test_configure_optimizers_can_pass_all_parameters(make_trainer: MakeTrainer) -> None:
    class Own(Adaptable):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Own()
    before = copy.deepcopy(module.net.state_dict())
    trainer = make_trainer(lora=4, max_steps=2, gradient_clip_val=1.0)
    trainer.fit(module, token_batches(2))
    assert {name for name, each in module.net.named_parameters() if each in trainer.optimizers[0].state} == set(
        adapter_state(module.net)
    )
    now = module.net.state_dict()
    assert all(torch.equal(now[name], each) for name, each in before.items())


@pytest.mark.parametrize("base", BASES)
def test_the_summary_counts_trained_and_frozen(make_trainer: MakeTrainer, base: str) -> None:
    module = Adaptable()
    num_plain = sum(each.numel() for each in module.parameters())
    make_trainer(lora=lora(base), optimizer=OPTIMIZER, max_steps=1).fit(module, token_batches(1))
    summary = summarize(module)
    num_adapters = sum(each.numel() for each in adapter_state(module).values())
    assert num_adapters == 2 * 4 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)
    assert (summary.num_frozen, summary.total.num_trainable) == (num_plain, num_adapters)
    num_coded = sum(2 * each for each in (32 * 96, 32 * 32, 32 * 128, 128 * 32))
    frozen_bytes = {"as_is": 4.0, "int8": 1.0625, "nf4": 0.5625}[base]
    assert summary.total.num_bytes == 4 * (num_plain - num_coded + num_adapters) + frozen_bytes * num_coded


def test_memory_techniques_are_supported_with_adapters(make_trainer: MakeTrainer) -> None:
    def trained(**levers: Any) -> Module:
        module = Adaptable()
        torch.manual_seed(3)
        trainer = make_trainer(lora=lora("nf4", dropout=0.1), optimizer=OPTIMIZER, max_steps=3, **levers)
        trainer.fit(module, token_batches(3))
        return module

    plain = trained()
    assert states_equal(trained(activation_checkpointing="full"), plain)


def test_a_checkpoint_without_adapters_is_rejected(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(optimizer=OPTIMIZER, max_steps=1, enable_checkpointing=True)
    trainer.fit(Adaptable(), token_batches(1))
    trainer.save_checkpoint(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="lora_A"):
        make_trainer(lora=4, optimizer=OPTIMIZER, max_steps=2).fit(
            Adaptable(), token_batches(1), ckpt_path=tmp_path / "plain"
        )


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", [Adaptable, OnMeta])
def test_weights_of_a_checkpoint_of_the_plain_model(
    make_trainer: MakeTrainer, tmp_path: Path, base: str, kind: type[Adaptable]
) -> None:
    plain, batches = Adaptable(), token_batches(2)
    trainer = make_trainer(optimizer=OPTIMIZER, max_steps=2, enable_checkpointing=True)
    trainer.fit(plain, batches)
    trainer.save_checkpoint(tmp_path / "plain")
    module = kind()
    trainer = make_trainer(lora=lora(base), optimizer={**OPTIMIZER, "lr": 1e-12}, max_steps=1)
    trainer.fit(module, batches, weights=tmp_path / "plain")
    rounding = {"as_is": 1e-6, "int8": 1e-3, "nf4": 2e-2}[base]
    losses = [loss_of(each, batches[0]).item() for each in (module.net, plain.net)]
    assert losses[0] == pytest.approx(losses[1], abs=rounding)
    trainer.save_checkpoint(tmp_path / "adapted")
    again = Adaptable()  # all weights are read from a checkpoint with adapters
    make_trainer(lora=lora(base), optimizer={**OPTIMIZER, "lr": 1e-12}, max_steps=1).fit(
        again, batches, weights=tmp_path / "adapted"
    )
    assert all(torch.allclose(each, again.state_dict()[name], atol=1e-6) for name, each in module.state_dict().items())


def test_a_damaged_or_other_checkpoint_is_reported_with_the_name_of_the_argument(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(optimizer=OPTIMIZER, max_steps=1, enable_checkpointing=True)
    trainer.fit(Adaptable("llama"), token_batches(1))
    trainer.save_checkpoint(tmp_path / "other")
    with pytest.raises(CheckpointError, match="weights="):
        make_trainer(lora=4, optimizer=OPTIMIZER, max_steps=1).fit(
            Adaptable(), token_batches(1), weights=tmp_path / "other"
        )


def test_named_modules_are_trained_in_full_in_addition_to_the_adapters(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A new output layer has no pretrained weights to freeze."""
    batches = token_batches(6)
    module = Adaptable()
    network = module.net
    before = copy.deepcopy(network.state_dict())
    settings = lora(targets=["attention.out"], trained=["head", "norm"])
    trainer = make_trainer(lora=settings, optimizer=OPTIMIZER, max_steps=3, gradient_clip_val=1.0)
    trainer.fit(module, batches)
    moved = {
        name for name, each in network.state_dict().items() if name not in before or not torch.equal(each, before[name])
    }
    assert {name for name in moved if not is_adapter(name)} == {"head.weight", "norm.weight", "norm.bias"}
    assert {"head.weight", "norm.bias"} <= {name.removeprefix("net.") for name in adapter_state(module)}
    assert not network.tokens.weight.requires_grad


@pytest.mark.parametrize(
    ("trained", "problem"),
    [
        ("hed", "must be the end of the name of a module with parameters. Did you mean 'head'"),
        ("mlp.up", "so its weights are"),
    ],
)
def test_an_unknown_name_of_a_trained_module_is_rejected(make_trainer: MakeTrainer, trained: str, problem: str) -> None:
    trainer = make_trainer(lora=lora(trained=[trained]), optimizer=OPTIMIZER, max_steps=1)
    with pytest.raises(RoomierError, match=problem) as caught:
        trainer.fit(Adaptable(), token_batches(2))
    assert caught.value.field == "lora.trained"
