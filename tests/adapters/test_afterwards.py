"""A model with adapters after its run: pickling, further runs without the keyword, and save_pretrained."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roomier import Trainer
from roomier.adapters import adapter_state, merge_lora
from roomier.api.blocks import find_blocks
from roomier.checkpoint import load_module
from roomier.checkpoint.export.safetensors import export_safetensors
from roomier.core.errors import CheckpointError, PlanError, RoomierError
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import Adapted, is_adapter
from roomier.techniques.adapters.lora import adapters_of, as_keyword
from tests.adapters.models import MODELS, Adaptable, loss_of, make_transformer, token_batches

pytestmark = pytest.mark.more

MakeTrainer = Callable[..., Trainer]
OPTIMIZER = {"name": "adamw", "lr": 1e-2}
BASES = ["as_is", "int8", "nf4"]


def trained(make_trainer: MakeTrainer, module: Any, **lora: Any) -> Any:
    trainer = make_trainer(lora={"rank": 4, **lora}, optimizer=OPTIMIZER, max_steps=2)
    trainer.fit(module, token_batches(2))
    return module


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_with_adapters_can_be_pickled_and_copied(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str, base: str
) -> None:
    network: nn.Module = trained(make_trainer, Adaptable(kind), base=base, dropout=0.1).net.eval()
    torch.save(network, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    batch = token_batches(1)[0]
    for again in (read, copy.deepcopy(network), *(pickle.loads(pickle.dumps(network, each)) for each in (0, 1, 5))):
        assert [type(each) for each in again.modules()] == [type(each) for each in network.modules()]
        assert torch.equal(loss_of(again, batch), loss_of(network, batch))
        assert adapters_of(again, find_blocks(again)) == adapters_of(network, find_blocks(network))
        with pytest.raises(RoomierError, match="save_pretrained"):
            again.save_pretrained(tmp_path / "out")
    before = loss_of(network, batch)
    merge_lora(read)
    assert not any(isinstance(each, Adapted) for each in read.modules())
    assert torch.equal(loss_of(network, batch), before)  # the copy is independent


def test_a_layer_with_custom_pickling_is_rejected(make_trainer: MakeTrainer) -> None:
    module = Adaptable()
    module.net.blocks[0].attention.out.__class__ = OwnWay
    trained(make_trainer, module)
    with pytest.raises(RoomierError, match="has custom pickling in OwnWay"):
        pickle.dumps(module.net)


class OwnWay(nn.Linear):
    def __reduce__(self) -> Any:
        return OwnWay, (self.in_features, self.out_features)


def test_adapters_of_a_second_run_are_stored_with_those_of_the_first(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = trained(make_trainer, Adaptable(), targets=["mlp.up"])
    trainer = make_trainer(lora={"rank": 4, "targets": ["mlp.out"]}, optimizer=OPTIMIZER, max_steps=1)
    trainer.fit(module, token_batches(1))
    assert "2 layers that lora.targets does not include have adapters from an earlier run" in capfd.readouterr().err
    trainer.save_checkpoint(tmp_path / "saved")
    again = load_module(Adaptable, tmp_path / "saved")
    assert torch.equal(loss_of(again.net, token_batches(1)[0]), loss_of(module.net, token_batches(1)[0]))


@pytest.mark.parametrize("base", BASES)
def test_a_second_run_without_the_keyword_keeps_and_reports_the_adapters(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str], base: str
) -> None:
    module, batches = trained(make_trainer, Adaptable(), base=base, alpha=8), token_batches(2)
    assert "does not contain" not in capfd.readouterr().err
    before = copy.deepcopy(module.state_dict())
    trainer = make_trainer(optimizer=OPTIMIZER, max_steps=2, enable_plan_table=True)
    trainer.fit(module, batches)
    shown = capfd.readouterr().err
    found = f"rank 4 on 8 layers{'' if base == 'as_is' else f', frozen weights in {base}'}. The adapters remain, and no"
    assert shown.count("the model has adapters that this Plan does not contain") == 1
    assert found in shown
    assert "from roomier.adapters import merge_lora" in shown
    assert "LoRA, rank 4, on blocks" in shown  # a row of the table, although no keyword requested it
    assert ("Every choice is exact" in shown) == (base == "as_is")
    moved = {name for name, each in module.state_dict().items() if not torch.equal(each, before[name])}
    assert moved
    assert all(map(is_adapter, moved))
    trainer.save_checkpoint(tmp_path / "second")
    loaded = Adaptable.load_from_checkpoint(tmp_path / "second")
    assert torch.equal(loss_of(loaded.net, batches[0]), loss_of(module.net, batches[0]))
    export_safetensors(tmp_path / "second", tmp_path / "out")
    make_trainer(optimizer=OPTIMIZER, max_steps=1).validate(module, batches)
    assert found in capfd.readouterr().err


def test_quantized_weights_of_an_earlier_run_are_reported_and_not_supported_with_sharding(
    make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    module = trained(make_trainer, Adaptable(), base="nf4")
    make_trainer(lora=4, optimizer=OPTIMIZER, max_steps=1).fit(module, token_batches(1))
    assert "frozen weights in nf4 from an earlier run. These weights remain quantized" in capfd.readouterr().err
    with pytest.raises(
        PlanError, match=r"from an earlier run, but it is not supported with strategy 'zero2'.*merge_lora"
    ):
        make_trainer(strategy="zero2", devices=1, optimizer=OPTIMIZER, max_steps=1).fit(module, token_batches(1))


def test_adapters_of_returns_the_settings(make_trainer: MakeTrainer) -> None:
    settings = {"alpha": 8.0, "dropout": 0.25, "targets": ["attention.out"], "trained": ["head"], "base": "int8"}
    module = trained(make_trainer, Adaptable(), **settings)
    found = adapters_of(module, find_blocks(module))
    assert found is not None
    targets = ["net.blocks.0.attention.out", "net.blocks.1.attention.out"]
    assert as_keyword(found) == {**settings, "rank": 4, "targets": targets, "trained": ["net.head"]}
    assert as_keyword(AdapterPlan(lora_rank=8)) == {"rank": 8}
    plain = MODELS["gpt"]()
    assert adapters_of(plain, find_blocks(plain)) is None


@pytest.mark.parametrize("base", ["as_is", "nf4"])
def test_save_pretrained_requires_a_plain_model(make_trainer: MakeTrainer, tmp_path: Path, base: str) -> None:
    network = make_transformer("gpt2")
    trained(make_trainer, network, base=base).eval()
    for part in (network, network.transformer):
        with pytest.raises(RoomierError, match=r"merge_lora\(model\).*export_adapter.*roomier export"):
            part.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    network.save_pretrained(tmp_path / "given", state_dict=adapter_state(network))  # an explicit state_dict is allowed
    batch = token_batches(1)[0]
    expected = loss_of(network, batch)
    merge_lora(network)
    assert "save_pretrained" not in {**vars(network), **vars(network.transformer)}
    network.save_pretrained(tmp_path / "plain")
    again = type(network).from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(loss_of(again, batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", ["as_is", "nf4"])
def test_the_error_for_a_plain_model_contains_the_lora_keyword(
    make_trainer: MakeTrainer, tmp_path: Path, base: str
) -> None:
    settings = {"rank": 4, "base": base} if base != "as_is" else {"rank": 4}
    trainer = make_trainer(lora=settings, optimizer=OPTIMIZER, max_steps=1)
    trainer.fit(Adaptable(), token_batches(1))
    path = tmp_path / "checkpoints" / "saved"
    trainer.save_checkpoint(path)
    plain = make_trainer(optimizer=OPTIMIZER, max_steps=2)
    for run in (
        lambda: plain.validate(Adaptable(), token_batches(1), ckpt_path=path),
        lambda: plain.fit(Adaptable(), token_batches(1), ckpt_path=path),
        lambda: plain.fit(Adaptable(), token_batches(1), weights=path),
    ):
        with pytest.raises(CheckpointError, match="was saved with adapters that this model does not have") as caught:
            run()
        assert f"Pass lora={settings}" in caught.value.action
    with pytest.raises(
        RoomierError, match=r"a folder that contains checkpoints. Pass one of them. The newest is .*saved"
    ):
        plain.fit(Adaptable(), token_batches(1), weights=tmp_path)
    make_trainer(lora=settings).validate(Adaptable(), token_batches(1), ckpt_path=path)


def test_a_tied_weight_that_also_trains_is_reported(
    make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    network = trained(make_trainer, make_transformer("gpt2"), trained=["lm_head"])
    assert network.transformer.wte.weight.requires_grad
    shown = capfd.readouterr().err
    assert "lora.trained='lm_head': lm_head.weight is tied to transformer.wte.weight, so both are trained" in shown
    trained(make_trainer, make_transformer("llama"), trained=["lm_head"])
    assert "tied" not in capfd.readouterr().err
