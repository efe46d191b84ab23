"""Finding the newest valid checkpoint, and notices about the other checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from roomier import checkpoint
from roomier.checkpoint import record
from roomier.core.errors import CheckpointError


def state_of(step: int) -> dict:
    return {"module": {"w": torch.full((50,), float(step))}, "progress": {"global_step": step}}


def tensor_file(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def truncate_tensors(path: Path) -> str:
    os.truncate(tensor_file(path), tensor_file(path).stat().st_size - 1)
    return tensor_file(path).name


def delete_tensors(path: Path) -> str:
    name = tensor_file(path).name
    tensor_file(path).unlink()
    return name


def truncate_record(path: Path) -> str:
    os.truncate(path / "run.json", (path / "run.json").stat().st_size // 2)
    return "run.json"


def empty_record(path: Path) -> str:
    os.truncate(path / "run.json", 0)
    return "run.json"


def delete_record(path: Path) -> str:
    (path / "run.json").unlink()
    return "run.json"


def add_to_record(path: Path) -> str:
    with open(path / "run.json", "a") as file:
        file.write(" ")
    return "run.json"


def flip_bit(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def flip_tensor_bit(path: Path) -> str:
    flip_bit(tensor_file(path), -5)
    return tensor_file(path).name


def flip_header_bit(path: Path) -> str:
    flip_bit(tensor_file(path), 20)
    return tensor_file(path).name


def flip_record_bit(path: Path) -> str:
    position = (path / "run.json").read_bytes().index(b'"global_step":') + len('"global_step":')
    flip_bit(path / "run.json", position)
    return "run.json"


VISIBLE = [truncate_tensors, delete_tensors, truncate_record, empty_record, delete_record, add_to_record]
ONLY_BY_SUM = [flip_tensor_bit, flip_header_bit]


@pytest.mark.parametrize("harm", [*VISIBLE, *ONLY_BY_SUM, flip_record_bit])
def test_damage_is_reported_with_its_file_and_an_alternative_checkpoint(tmp_path, harm):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / f"step={step}", state_of(step))
    flip_tensor_bit(tmp_path / "step=2")
    culprit = harm(tmp_path / "step=3")
    into = {"module": {"w": torch.zeros(50)}}
    for attempt in (checkpoint.verify, lambda path: checkpoint.load(path, into=into)):
        with pytest.raises(CheckpointError) as caught:
            attempt(tmp_path / "step=3")
        assert caught.value.received == str(tmp_path / "step=3")
        assert culprit in caught.value.problem
        assert caught.value.action == f"Use {str(tmp_path / 'step=1')!r}, the newest valid checkpoint next to it"
    assert not into["module"]["w"].any()
    checkpoint.verify(tmp_path / "step=1")


@pytest.mark.parametrize("harm", [*VISIBLE, flip_record_bit])
def test_find_last_skips_a_damaged_newest_checkpoint_with_a_notice(tmp_path, capsys, harm):
    checkpoint.save(tmp_path / "a", state_of(1))
    checkpoint.save(tmp_path / "b", state_of(2))
    harm(tmp_path / "b")
    assert checkpoint.find_last(tmp_path) == tmp_path / "a"
    printed = capsys.readouterr().err
    assert f"skipped the checkpoint {tmp_path / 'b'}" in printed
    assert f"using {tmp_path / 'a'}" in printed
    assert checkpoint.list_complete(tmp_path) == [tmp_path / "a"]


def test_an_older_damaged_checkpoint_is_skipped_without_a_notice(tmp_path, capsys):
    checkpoint.save(tmp_path / "a", state_of(1))
    checkpoint.save(tmp_path / "b", state_of(2))
    truncate_tensors(tmp_path / "a")
    assert checkpoint.find_last(tmp_path) == tmp_path / "b"
    assert capsys.readouterr().err == ""


def test_find_last_ignores_names_and_modification_times(tmp_path):
    for name in ("z", "step=10", "step=9", "a"):
        checkpoint.save(tmp_path / name, state_of(1))
    os.utime(tmp_path / "z")
    assert checkpoint.find_last(tmp_path) == tmp_path / "a"
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["z", "step=10", "step=9", "a"]


def test_find_last_from_any_level(tmp_path):
    runs = tmp_path / "runs"
    first = runs / "version_0" / "checkpoints" / "step=5"
    second = runs / "version_1" / "checkpoints" / "step=1"
    checkpoint.save(first, state_of(5))
    checkpoint.save(second, state_of(1))
    assert checkpoint.find_last(runs) == second
    assert checkpoint.find_last(str(runs / "version_0")) == first
    assert checkpoint.find_last(first.parent) == first
    assert checkpoint.find_last(first) == first


def test_find_last_without_checkpoints(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "checkpoints").mkdir()
    for root in (tmp_path, tmp_path / "missing", tmp_path / "file", tmp_path / "checkpoints"):
        assert checkpoint.find_last(root) is None
        assert checkpoint.list_complete(root) == []
    assert capsys.readouterr().err == ""


def test_foreign_and_incomplete_folders_are_skipped_without_a_notice(tmp_path, capsys):
    checkpoint.save(tmp_path / "good", state_of(1))
    shutil.copytree(tmp_path / "good", tmp_path / ".tmp-next@00000000-1-00000000")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run.json").write_text(json.dumps({"id": 1}))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    assert checkpoint.find_last(tmp_path) == tmp_path / "good"
    assert checkpoint.list_complete(tmp_path) == [tmp_path / "good"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["missing", "wandb", "empty", "file"])
def test_a_folder_that_is_not_a_checkpoint_is_rejected(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run.json").write_text(json.dumps({"id": 1}))
    (tmp_path / "file").write_text("text")
    for verb in (checkpoint.load, checkpoint.peek, checkpoint.verify):
        with pytest.raises(CheckpointError) as caught:
            verb(tmp_path / name)
        assert caught.value.received == str(tmp_path / name)
        assert caught.value.action == "Pass the path of a checkpoint folder"


def test_a_newer_format_is_rejected_with_the_version_that_wrote_it(tmp_path, monkeypatch, capsys):
    checkpoint.save(tmp_path / "old", state_of(1))
    monkeypatch.setattr("roomier.checkpoint.saving.FORMAT_VERSION", record.FORMAT_VERSION + 1)
    checkpoint.save(tmp_path / "new", state_of(2))
    with pytest.raises(CheckpointError, match=r"has format version 4, .* reads only 2 and 3\. Load it with roomier \d"):
        checkpoint.load(tmp_path / "new")
    assert checkpoint.find_last(tmp_path) == tmp_path / "old"
    assert "format version 4" in capsys.readouterr().err


def test_a_record_with_a_path_outside_its_folder_is_rejected(tmp_path):
    checkpoint.save(tmp_path / "c", state_of(1))
    good = record.read_record(tmp_path / "c")
    outside = record.StoredFile("../secret.safetensors", 1, 1, ())
    record.write_record(tmp_path / "c", record.Record(**{**vars(good), "files": (outside,)}))
    with pytest.raises(CheckpointError, match=r"is '../secret.safetensors', but must be the name of a tensor file"):
        checkpoint.load(tmp_path / "c")


def test_a_single_damaged_checkpoint_is_rejected_without_an_alternative(tmp_path):
    checkpoint.save(tmp_path / "c", state_of(1))
    flip_tensor_bit(tmp_path / "c")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(tmp_path / "c")
    assert caught.value.action == "Use another checkpoint"
    truncate_tensors(tmp_path / "c")
    assert checkpoint.find_last(tmp_path) is None


def test_a_link_to_a_checkpoint_is_not_listed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "step=1", state_of(1))
    (tmp_path / "last").symlink_to("step=1")
    assert checkpoint.list_complete(tmp_path) == [tmp_path / "step=1"]
    assert checkpoint.find_last(tmp_path) == tmp_path / "step=1"
    assert checkpoint.peek(tmp_path / "last")["progress"] == {"global_step": 1}
