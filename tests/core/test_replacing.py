"""Atomic replacement of files: errors, kills, links and several files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roomier.core import replacing as module
from roomier.core.replacing import replacing, replacing_path

KILLED = """
import os, signal, sys
from pathlib import Path
from roomier.core.replacing import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write("new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_error_leaves_the_old_file_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "values.txt"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines(["new", 1])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["values.txt"]


def test_the_next_process_removes_the_files_of_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "values.txt"
    path.write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    [left] = [name for name in os.listdir(tmp_path) if name != "values.txt"]
    alive = tmp_path / f".other.txt@{module.new_owner()}.aside"
    alive.mkdir()
    monkeypatch.setattr(module, "_cleared", set())
    with replacing(tmp_path / "second.txt") as file:
        file.write("new")
    assert sorted(os.listdir(tmp_path)) == sorted([alive.name, "second.txt", "values.txt"])
    assert left.startswith(".values.txt@")


def test_files_next_to_the_file_are_moved_before_it(tmp_path: Path) -> None:
    with replacing_path(tmp_path / "model.onnx") as aside:
        aside.write_text("model")
        aside.with_name("model.onnx.data").write_text("data")
        assert os.listdir(tmp_path) == [aside.parent.name]
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]


def test_a_link_is_replaced_even_if_its_target_does_not_exist(tmp_path: Path) -> None:
    for target in ("first", "second"):
        with replacing_path(tmp_path / "last") as aside:
            aside.symlink_to(target)
    assert os.readlink(tmp_path / "last") == "second"
