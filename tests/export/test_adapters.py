"""Adapters are either merged into the weights of the plain model and exported, or exported alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from roomier import Trainer, checkpoint
from roomier.adapters import adapter_state, merge_lora
from roomier.checkpoint.export.adapter import export_adapter, export_adapter_of
from roomier.checkpoint.export.plain import weights_of
from roomier.checkpoint.export.safetensors import export_safetensors
from roomier.cli.main import main
from roomier.core.errors import RoomierError
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.lora import apply_lora
from tests.adapters.models import MODELS, loss_of, make_gpt, token_batches


def trained(make_trainer: Callable[..., Trainer], kind: str, path: Path, **lora: Any) -> nn.Module:
    network: nn.Module = MODELS[kind]()
    settings = {"rank": 4, "alpha": 8, **lora}
    trainer = make_trainer(lora=settings, optimizer={"name": "adamw", "lr": 3e-2}, max_steps=3)
    batches = token_batches(3)
    if kind == "gpt":
        batches = [(each["input_ids"], each["labels"]) for each in batches]  # type: ignore[misc]
    trainer.fit(network, batches)
    trainer.save_checkpoint(path)
    return network


@pytest.mark.parametrize("base", ["as_is", "int8", "nf4"])
@pytest.mark.parametrize("kind", MODELS)
def test_checkpoint_is_exported_merged(
    make_trainer: Callable[..., Trainer], tmp_path: Path, kind: str, base: str
) -> None:
    network = trained(make_trainer, kind, tmp_path / "saved", base=base)
    export_safetensors(tmp_path / "saved", tmp_path / "out")
    plain = MODELS[kind]()
    load_model(plain, tmp_path / "out" / "model.safetensors")
    batch = token_batches(1)[0]
    torch.testing.assert_close(loss_of(plain, batch), loss_of(network, batch), rtol=1e-5, atol=1e-5)
    merged = merge_lora(network).state_dict()
    for name, each in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(each, merged[name], rtol=1e-6, atol=1e-7)


def test_command_merges_and_transformers_loads_the_result(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    import transformers

    network = trained(make_trainer, "gpt2", tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), "--to", "safetensors", "--output", str(tmp_path / "out")]) == 0
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").train()
    batch = token_batches(1)[0]
    torch.testing.assert_close(loss_of(loaded, batch), loss_of(network, batch), rtol=1e-5, atol=1e-5)


def test_tied_weight_with_an_adapter_is_rejected(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trained(make_trainer, "gpt2", tmp_path / "saved", targets=["lm_head", "c_fc"])
    with pytest.raises(RoomierError, match="another layer shares this weight"):
        export_safetensors(tmp_path / "saved", tmp_path / "out")


def test_adapters_alone_in_the_layout_of_peft(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    network = trained(make_trainer, "gpt2", tmp_path / "saved", targets=["c_fc"])
    export_adapter(network, tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.transformer.h.0.mlp.c_fc"
    assert found[f"{name}.lora_A.weight"].shape == (4, 32)
    assert found[f"{name}.lora_B.weight"].shape == (48, 4)
    own = adapter_state(network)["transformer.h.0.mlp.c_fc.lora_B"]
    assert torch.equal(found[f"{name}.lora_B.weight"].T, own)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (4, 8, True)
    with pytest.raises(RoomierError, match="already exists and is not empty"):
        export_adapter(network, tmp_path / "adapter")
    with pytest.raises(RoomierError, match="has no adapters"):
        export_adapter(make_gpt(), tmp_path / "other")


def test_both_weight_layouts_are_exported_in_the_layout_of_peft(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    network = nn.ModuleDict({"plain": nn.Linear(8, 6), "other": Conv1D(6, 8)})
    settings = AdapterPlan(lora_rank=2, lora_targets="plain,other")
    apply_lora(network, [], settings)
    checkpoint.save(tmp_path / "saved", {"module": network.state_dict()})
    export_adapter(network, tmp_path / "of_network")
    export_adapter_of(tmp_path / "saved", tmp_path / "of_checkpoint", settings)
    for folder in ("of_network", "of_checkpoint"):
        found = load_file(tmp_path / folder / "adapter_model.safetensors")
        for name in ("plain", "other"):
            assert found[f"base_model.model.{name}.lora_A.weight"].shape == (2, 8)
            assert found[f"base_model.model.{name}.lora_B.weight"].shape == (6, 2)
        assert torch.equal(found["base_model.model.plain.lora_A.weight"], network["plain"].lora_A)
        assert torch.equal(found["base_model.model.other.lora_A.weight"], network["other"].lora_A.T)


def test_checkpoint_with_adapters_and_an_empty_tensor_is_merged(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(8, 6))
    network.register_buffer("cache", torch.empty(0, 3))
    settings = AdapterPlan(lora_rank=2, lora_targets="0")
    apply_lora(network, [], settings)
    checkpoint.save(tmp_path / "saved", {"module": network.state_dict(), "plan": {"adapter": asdict(settings)}})
    merged = weights_of(tmp_path / "saved")
    assert merged["cache"].shape == (0, 3)
    assert torch.equal(merged["0.weight"], merge_lora(network).state_dict()["0.weight"])


def test_fully_trained_modules_are_included_in_the_layout_of_peft(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    network = trained(make_trainer, "gpt2", tmp_path / "saved", targets=["c_fc"], trained=["ln_f"])
    export_adapter(network, tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(found["base_model.model.transformer.ln_f.weight"], network.transformer.ln_f.weight)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["transformer.ln_f"]


def test_fully_trained_tied_weights_are_included(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    network = trained(make_trainer, "gpt2", tmp_path / "saved", targets=["c_fc"], trained=["lm_head"])
    export_adapter(network, tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in ("lm_head", "transformer.wte"):
        assert torch.equal(found[f"base_model.model.{name}.weight"], network.lm_head.weight)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_layers_with_only_adapters_are_not_treated_as_fully_trained(
    make_trainer: Callable[..., Trainer], tmp_path: Path, base: str
) -> None:
    network = trained(make_trainer, "llama", tmp_path / "saved", base=base, trained=["norm"])
    export_adapter(network, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["model.norm"]
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert {each.split(".")[-2] for each in names} == {"lora_A", "lora_B", "norm"}


def test_checkpoint_whose_plan_has_no_adapters_is_rejected(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    network = trained(make_trainer, "gpt", tmp_path / "saved")
    checkpoint.save(tmp_path / "unnamed", {"module": network.state_dict()})
    with pytest.raises(RoomierError, match="has adapters, but its plan does not contain their scale"):
        export_safetensors(tmp_path / "unnamed", tmp_path / "out")
