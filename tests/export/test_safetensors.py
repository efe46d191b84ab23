"""safetensors and transformers can load the files of ``roomier export``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from roomier import Module, Trainer, checkpoint
from roomier.checkpoint import tensor_file
from roomier.checkpoint.export.safetensors import export_safetensors
from roomier.cli.main import main
from roomier.core.errors import CheckpointError, RoomierError
from tests.covering import covering, few
from tests.ranks.pool import RankPool

transformers.PreTrainedModel  # noqa: B018 - imports the code of models once, instead of in each rank


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding": torch.randn(11, 5, generator=generator),
        "layer.weight": torch.randn(7, 3, generator=generator),
        "layer.bias": torch.randn(1, generator=generator),
        "scale": torch.tensor(2.5),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor([1, 2, 3]),
        "empty": torch.empty(0, 4),
        "half": torch.randn(3, generator=generator).bfloat16(),
    }


def save_on_ranks(path: Path, dim: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = {
        name: distribute_tensor(tensor, mesh, [Shard(dim)]) if tensor.dim() > dim else tensor
        for name, tensor in weights().items()
    }
    checkpoint.save(path, {"module": module, "optimizers": [{"state": torch.ones(3)}]})


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("dim", "chunk_bytes"), few(covering([0, 1], [16, 2**24])))
def test_checkpoint_of_several_ranks_is_unsharded(
    tmp_path: Path, on_ranks: RankPool, monkeypatch: Any, dim: int, chunk_bytes: int
) -> None:
    on_ranks(3, save_on_ranks, tmp_path / "c", dim)
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("roomier.checkpoint.export.merged.CHUNK_BYTES", chunk_bytes)
    done = export_safetensors(tmp_path / "c", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), weights())
    assert done.num_bytes == sum(tensor.nbytes for tensor in weights().values())
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers requires this entry"


def test_several_files_have_an_index(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"module": weights()})
    done = export_safetensors(tmp_path / "c", tmp_path / "out", max_shard_bytes=100)
    assert done.files == tuple(f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
    found: dict[str, torch.Tensor] = {}
    for name in done.files:
        held = load_file(tmp_path / "out" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == held.keys()
        assert sum(tensor.nbytes for tensor in held.values()) <= 220
        found.update(held)
    assert_equal(found, weights())


def test_dtype_applies_to_floating_point_tensors(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"module": weights()})
    export_safetensors(tmp_path / "c", tmp_path / "out", dtype="bf16")
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in weights().items()}
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), expected)


class Tied(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_are_written_one_time_and_loaded_twice(tmp_path: Path) -> None:
    module = Tied()
    checkpoint.save(tmp_path / "c", {"module": module.state_dict()})
    export_safetensors(tmp_path / "c", tmp_path / "out")
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["first.weight"]
    other = Tied()
    load_model(other, tmp_path / "out" / "model.safetensors")
    assert torch.equal(other.second.weight, module.first.weight)


class Gpt2(Module):
    """Module with a Hugging Face model and a separate head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = toy_gpt2()
        self.extra = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss + 0 * self.extra.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def toy_gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    )


def fit_gpt2(folder: Path, num_ranks: int, inside: bool) -> dict[str, torch.Tensor]:
    model = Gpt2() if inside else toy_gpt2()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy="zero3" if num_ranks > 1 else "single",
        optimizer=None if inside else "sgd",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(1))
    trainer.fit(model, [tokens if inside else {"input_ids": tokens, "labels": tokens}] * 8)
    trainer.save_checkpoint(folder / "c")
    network = model.model if inside else model
    return {name: getattr(each, "full_tensor", each.clone)() for name, each in network.state_dict().items()}


@pytest.mark.parametrize(("num_ranks", "inside"), few([(1, True), (2, False)]))
def test_transformers_loads_the_folder(tmp_path: Path, on_ranks: RankPool, num_ranks: int, inside: bool) -> None:
    trained = on_ranks(num_ranks, fit_gpt2, tmp_path, num_ranks, inside)[0]
    done = export_safetensors(tmp_path / "c", tmp_path / "out", max_shard_bytes=2000)
    assert len(done.files) > 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), "no missing or unexpected keys and no mismatched shapes"
    found = model.state_dict()
    assert found.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(found[name], tensor), name
    export_safetensors(tmp_path / "c", tmp_path / "half", dtype="bf16")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_omitted_entries_are_reported(tmp_path: Path, capsys: Any) -> None:
    checkpoint.save(tmp_path / "c", {"module": {"a.x": torch.ones(2), "b.y": torch.zeros(1), "b.extra": {"n": 1}}})
    export_safetensors(tmp_path / "c", tmp_path / "out", prefix="a.")
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), {"x": torch.ones(2)})
    output = capsys.readouterr().err
    assert "2 entries are omitted" in output
    assert "config.json was not written" in output


def test_prefix_with_and_without_trailing_dot(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"module": {"net.0.weight": torch.ones(2), "network": torch.zeros(1)}})
    for number, prefix in enumerate(("net", "net.")):
        export_safetensors(tmp_path / "c", tmp_path / str(number), prefix=prefix)
        assert set(load_file(tmp_path / str(number) / "model.safetensors")) == {"0.weight"}


def test_invalid_arguments_are_rejected_without_output(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"module": weights()})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for arguments, words in (
        ({"output": tmp_path / "full"}, "already exists"),
        ({"output": tmp_path / "c"}, "already exists"),
        ({"output": tmp_path / "out", "dtype": "int4"}, "is unknown"),
        ({"output": tmp_path / "out", "prefix": "layers."}, "Did you mean 'layer.'"),
    ):
        with pytest.raises(RoomierError, match=words):
            export_safetensors(tmp_path / "c", **arguments)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        export_safetensors(tmp_path / "c", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["c", "full"]


def test_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint.save(tmp_path / "c", {"module": weights()})

    def no_space(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tensor_file.TensorFile, "append", no_space)
    with pytest.raises(CheckpointError, match="No space left"):
        export_safetensors(tmp_path / "c", tmp_path / "out")
    assert os.listdir(tmp_path) == ["c"]


def test_command(tmp_path: Path, capsys: Any) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step={step}", {"module": {"w": torch.full((300,), float(step))}})
    assert main(["export", str(tmp_path), "--to", "safetensors", "--max-shard-size", "1KiB", "--dtype", "bf16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    found = load_file(tmp_path / "step=2-safetensors" / "model.safetensors")
    assert torch.equal(found["w"], torch.full((300,), 2.0, dtype=torch.bfloat16))
    for arguments, words in (
        ([str(tmp_path / "step=2")], "--to"),
        ([str(tmp_path / "step=2"), "--to", "safetensors", "--max-shard-size", "big"], "is not a number of bytes"),
        ([str(tmp_path / "nothing"), "--to", "safetensors"], "is not an existing folder"),
    ):
        assert main(["export", *arguments]) == 2
        assert words in capsys.readouterr().err


MEASURED = """
import sys
from pathlib import Path
from roomier.checkpoint.export.safetensors import export_safetensors

def memory_kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

small, large, folder = map(Path, sys.argv[1:])
export_safetensors(small, folder / "small")
Path("/proc/self/clear_refs").write_text("5")
before = memory_kib("VmRSS")
export_safetensors(large, folder / "large", dtype="bf16", max_shard_bytes=100 * 10**6)
print((memory_kib("VmHWM") - before) * 1024)
"""


def save_large(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {f"w{index}": torch.full((2048, 4096), float(index)) for index in range(6)}
    checkpoint.save(
        path, {"module": {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in tensors.items()}}
    )


@pytest.mark.more
def test_memory_does_not_grow_with_the_model(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(2, save_large, tmp_path / "large")  # 192 MiB in tensors of 32 MiB
    checkpoint.save(tmp_path / "small", {"module": {"w": torch.ones(2)}})
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "small"), str(tmp_path / "large"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 32 * 2**20, "less than the size of its largest tensor"
    found = load_file(tmp_path / "out" / "large" / "model-00002-of-00002.safetensors")
    assert torch.equal(found["w5"], torch.full((2048, 4096), 5.0, dtype=torch.bfloat16))
