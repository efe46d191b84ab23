"""Initial weights from safetensors files, of which each rank reads its shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import roomier
from roomier import RoomierError
from roomier.core.ranks import Ranks
from roomier.engine.materialise import built_in_parts
from tests.covering import few
from tests.engine.materialised import (
    CustomStart,
    Make,
    built,
    differences,
    make_gpt,
    make_tied_gpt,
    plan_for,
    ranks_here,
    whole_tensors,
)
from tests.hugging_face.small import small
from tests.ranks.pool import RankPool

ALONE = plan_for("single", 1)


def with_weights(make: Make) -> nn.Module:
    torch.manual_seed(11)
    return make()


def write(network: nn.Module, path: Path) -> Path:
    """Write a file as Hugging Face does, with one name for tied weights."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            tensors[name] = tensor.detach().contiguous()
        seen.add(id(tensor))
    save_file(tensors, path)
    return path


def write_in_two(network: nn.Module, folder: Path) -> Path:
    """Write the weights into a folder of two files and an index."""
    state = network.state_dict()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: names[index % 2] for index, name in enumerate(state)}
    for file in names:
        save_file({name: state[name].contiguous() for name in state if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_on_ranks(strategy: str, num_ranks: int, gpt: Path, tied: Path, custom: Path) -> dict[str, list[str]]:
    ranks, plan = ranks_here(), plan_for(strategy, num_ranks)
    wrong: dict[str, list[str]] = {}
    for make, path in ((make_gpt, gpt), (make_tied_gpt, tied)):
        with torch.device("meta"):
            network = make()
        wrong[make.__name__] = differences(built(network, plan, ranks, path), with_weights(make))
    before = torch.get_rng_state()
    with built_in_parts(plan, ranks, has_weights=True):
        network = make_gpt()
    if not torch.equal(torch.get_rng_state(), before) and strategy != "ddp":
        wrong["make_gpt"].append("sampled unused numbers")
    wrong["make_gpt"] += differences(built(network, plan, ranks, gpt), with_weights(make_gpt))
    with built_in_parts(plan, ranks, has_weights=True):
        network = CustomStart()
    wrong["CustomStart"] = differences(built(network, plan, ranks, custom), with_weights(CustomStart))
    return wrong


@pytest.mark.parametrize(
    ("num_ranks", "strategies"), few([(2, ["zero3"]), (2, ["ddp"]), (3, ["zero2"]), (4, ["hsdp"])])
)
def test_each_rank_reads_its_shards(on_ranks: RankPool, tmp_path: Path, num_ranks: int, strategies: list[str]) -> None:
    gpt = write_in_two(with_weights(make_gpt), tmp_path)
    tied = write(with_weights(make_tied_gpt), tmp_path / "tied.safetensors")
    custom = write(with_weights(CustomStart), tmp_path / "custom.safetensors")
    expected: dict[str, list[str]] = {"make_gpt": [], "make_tied_gpt": [], "CustomStart": []}
    calls = [(strategy, num_ranks, gpt, tied, custom) for strategy in strategies]
    for strategy, by_rank in zip(strategies, on_ranks.each(num_ranks, read_on_ranks, calls), strict=True):
        assert by_rank == [expected] * num_ranks, strategy


@pytest.mark.parametrize("how", ["file", "folder", "index"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_process_reads_the_full_file(tmp_path: Path, how: str, device: str) -> None:
    expected = with_weights(make_gpt)
    path = write(expected, tmp_path / "model.safetensors")
    if how == "folder":
        path = tmp_path
    elif how == "index":
        (tmp_path / "two").mkdir()
        path = write_in_two(expected, tmp_path / "two") / "model.safetensors.index.json"
    with torch.device(device):
        network = make_gpt()
    assert differences(built(network, ALONE, Ranks(), path), expected) == []


def test_buffers_that_are_not_in_the_file_are_computed(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return small("LlamaForCausalLM", num_hidden_layers=1)

    expected = with_weights(make)
    expected.save_pretrained(tmp_path)
    with torch.device("meta"):
        network = make()
    assert differences(built(network, ALONE, Ranks(), tmp_path), expected) == []


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_gpt()


def test_a_file_of_one_child_of_the_model_is_detected(tmp_path: Path) -> None:
    path = write(with_weights(make_gpt), tmp_path / "gpt.safetensors")
    network = built(Wrapped(), ALONE, Ranks(), path)
    assert differences(network, with_weights(Wrapped)) == []


def test_another_dtype_is_converted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounded = with_weights(make_gpt).bfloat16()
    path = write(rounded, tmp_path / "model.safetensors")
    network = built(make_gpt(), ALONE, Ranks(), path)
    assert differences(network, rounded.float()) == []
    assert "converted from bfloat16 to float32" in capsys.readouterr().err


def linear(path: Path, **tensors: Tensor) -> Path:
    save_file(tensors, path / "model.safetensors")
    return path / "model.safetensors"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"weight": torch.ones(2, 3)}, "missing: bias"),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2), "scale": torch.ones(2)},
            "unexpected: scale",
        ),
        ({"weight": torch.ones(3, 2), "bias": torch.ones(2)}, r"different shapes: weight \[3, 2\] for \[2, 3\]"),
        ({"w": torch.ones(2, 3)}, "missing: weight, bias; unexpected: w"),
    ],
)
def test_tensors_that_do_not_match_are_rejected(tmp_path: Path, tensors: dict[str, Tensor], problem: str) -> None:
    network = nn.Linear(3, 2)
    before = {name: each.clone() for name, each in whole_tensors(network).items()}
    with pytest.raises(RoomierError, match=f"weights=.*does not match the model: {problem}. Pass the weights"):
        built(network, ALONE, Ranks(), linear(tmp_path, **tensors))
    assert all(torch.equal(before[name], each) for name, each in whole_tensors(network).items())


def test_an_invalid_weights_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.safetensors").write_bytes(linear(tmp_path, weight=torch.ones(999)).read_bytes()[:200])
    (tmp_path / "a.index.json").write_text('{"weight_map": {"weight": "gone.safetensors"}}')
    (tmp_path / "b.index.json").write_text("[]")
    (tmp_path / "weights.bin").write_text("")
    problems = {
        "empty": "contains neither model.safetensors nor",
        "cut.safetensors": "cannot be read",
        "a.index.json": "lists files that do not exist: gone.safetensors",
        "b.index.json": "is not a valid index of files",
        "weights.bin": "is not a .safetensors file",
        "nowhere": "does not exist",
    }
    for name, problem in problems.items():
        with pytest.raises(RoomierError, match=problem):
            built(nn.Linear(3, 2), ALONE, Ranks(), tmp_path / name)


class Classifier(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        self.network = nn.Linear(4, 2)

    def on_train_start(self) -> None:
        self.first = whole_tensors(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_from(folder: Path, num_ranks: int, path: Path, **arguments: Any) -> dict[str, Tensor]:
    strategy = {"strategy": "zero3", "devices": num_ranks} if num_ranks > 1 else {}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = roomier.Trainer(default_root_dir=folder, accelerator="cpu", max_steps=1, **quiet, **strategy)
    module = Classifier()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4), weights=path, **arguments)
    if not os.path.exists(folder / "saved"):
        trainer.save_checkpoint(folder / "saved")
    return module.first


@pytest.mark.more
def test_fit_accepts_files_and_checkpoints(tmp_path: Path, on_ranks: RankPool) -> None:
    torch.manual_seed(5)
    module = Classifier()
    module.configure_model()
    path = write(module, tmp_path / "model.safetensors")
    for found in (fit_from(tmp_path, 1, path), *on_ranks(2, fit_from, tmp_path, 2, path)):
        assert torch.equal(found["network.weight"], module.network.weight)
    stored = roomier.checkpoint.load(tmp_path / "saved", only=("module",))["module"]
    assert not torch.equal(stored["network.weight"], module.network.weight)
    for found in (fit_from(tmp_path, 1, tmp_path / "saved"), *on_ranks(2, fit_from, tmp_path, 2, tmp_path / "saved")):
        assert torch.equal(found["network.weight"], stored["network.weight"])


def test_a_resumed_run_does_not_read_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = linear(tmp_path, **{"network.weight": torch.ones(2, 4), "network.bias": torch.ones(2)})
    fit_from(tmp_path, 1, path)
    fit_from(tmp_path, 1, path, ckpt_path=tmp_path / "saved")
    assert f"is not read, because the run resumes from {tmp_path / 'saved'}" in capsys.readouterr().err


@pytest.mark.parametrize(("weights", "problem"), [(3, "is not a path"), ("nowhere", "does not exist")])
def test_fit_rejects_an_invalid_path_of_weights(tmp_path: Path, weights: Any, problem: str) -> None:
    with pytest.raises(RoomierError, match=f"weights=.*{problem}"):
        fit_from(tmp_path, 1, weights)
