"""Checkpoints, weights and token files are read from addresses as from folders."""

import pickle
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from roomier import checkpoint
from roomier.core.errors import CheckpointError
from roomier.data import TokenDataset, write_tokens
from roomier.engine.weights_file import WeightsFile


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """Address in the memory of this process."""
    return f"memory://{tmp_path.name}"


def upload(folder: Path, address: str) -> None:
    system, path = fsspec.url_to_fs(address)
    system.put(f"{folder}/", f"{path}/", recursive=True)


def state_of(step: int) -> dict:
    weights = {"w": torch.randn(500, 1000), "scalar": torch.tensor(float(step)), "empty": torch.empty(0, 3)}
    return {"module": weights, "progress": {"global_step": step}}


def test_a_remote_checkpoint_is_found_verified_and_loaded_like_a_local_one(tmp_path: Path, bucket: str) -> None:
    local = tmp_path / "runs" / "version_0" / "checkpoints"
    for step in (1, 2, 3):
        checkpoint.save(local / f"step={step}", state_of(step))
    upload(tmp_path / "runs", f"{bucket}/runs")
    remote = f"{bucket}/runs/version_0/checkpoints"
    system, path = fsspec.url_to_fs(remote)

    assert [str(each) for each in checkpoint.list_complete(remote)] == [f"{remote}/step={step}" for step in (1, 2, 3)]
    last = checkpoint.find_last(f"{bucket}/runs")
    assert last is not None
    assert pickle.loads(pickle.dumps(last)) == last
    for each in (last, str(last)):
        checkpoint.verify(each)
        found, expected = checkpoint.load(each), checkpoint.load(local / "step=3")
        assert all(torch.equal(found["module"][name], expected["module"][name]) for name in expected["module"])

    system.rm(f"{path}/step=3/run.json")  # as during an upload, because the record is the last file
    assert str(checkpoint.find_last(f"{bucket}/runs")) == f"{remote}/step=2"
    with pytest.raises(CheckpointError, match=r"no run\.json, which is uploaded last\. Use 'memory.*/step=2'"):
        checkpoint.load(f"{remote}/step=3")
    [name] = [each for each in system.ls(f"{path}/step=2", detail=False) if each.endswith(".safetensors")]
    data = system.cat_file(name)
    system.pipe_file(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"checksum does not match the record\. Use 'memory.*/step=1'"):
        checkpoint.load(f"{remote}/step=2")


def test_tokens_and_weights_are_read_from_addresses(tmp_path: Path, bucket: str) -> None:
    write_tokens(tmp_path / "train.tok", [np.arange(1000) % 50], vocab_size=50)
    trained, network = nn.Linear(40, 30), nn.Linear(40, 30)
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    upload(tmp_path, bucket)

    weights = WeightsFile(bucket)
    weights.check(network)
    weights.read_into(network)
    assert all(map(torch.equal, network.parameters(), trained.parameters()))

    local, remote = TokenDataset(tmp_path / "train.tok", 16), TokenDataset(f"{bucket}/train.tok", 16)
    assert len(local) == len(remote)
    for found, expected in zip(remote.__getitems__([0, 7, -1]), local.__getitems__([0, 7, -1]), strict=True):
        assert all(torch.equal(found[key], expected[key]) for key in expected)
