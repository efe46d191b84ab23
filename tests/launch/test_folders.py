"""The other ranks start in a folder in which relative paths have the same meaning as on rank 0."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from roomier.launch.environment import RANK_VARIABLES
from roomier.launch.start import command_again

pytestmark = pytest.mark.more

PROGRAMS = Path(__file__).parent / "programs"


def run(words: list[str], folder: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environ |= {"OMP_NUM_THREADS": "1", "ROOMIER_JOIN_TIMEOUT_S": "120"}
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "work" / "modules").mkdir(parents=True)
    (tmp_path / "work" / "modules" / "numbers_of_work.py").write_text("SCALE = 2.0\n")
    (tmp_path / "work" / "data.txt").write_text("1 2 3 4 5 6 7 8")
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROGRAMS / "changes_folder.py", tmp_path / "scripts")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["scripts/changes_folder.py", "a", "b"],
        pytest.param(["-m", "scripts.changes_folder", "a", "b"], marks=pytest.mark.slow),
    ],
)
def test_a_script_can_change_its_folder(project: Path, words: list[str]) -> None:
    printed = run([sys.executable, *words], project)
    folder = os.path.realpath(project / "work")
    assert sorted(printed.splitlines()) == [f"rank {rank} in {folder} of ['a', 'b']" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "widths", "pattern"),
    [
        (["width=3"], [3], "outputs/*/*"),
        ([], [2], "outputs/*/*"),
        (["width=3,4", "-m"], [3, 4], "multirun/*/*/*"),
    ],
)
def test_ranks_under_hydra_share_the_output_folder_of_rank_0(
    tmp_path: Path, words: list[str], widths: list[int], pattern: str
) -> None:
    pytest.importorskip("hydra", reason="Hydra is not installed")
    shutil.copy(PROGRAMS / "hydra_run.py", tmp_path)
    shutil.copytree(PROGRAMS / "hydra_conf", tmp_path / "hydra_conf")
    printed = run([sys.executable, "hydra_run.py", *words], tmp_path)
    folders = sorted(each for each in tmp_path.glob(pattern) if each.is_dir() and each.name != ".hydra")
    assert len(folders) == len(widths)
    for folder, width in zip(folders, widths, strict=True):
        assert {path.name for path in folder.glob("rank-*.txt")} == {"rank-0.txt", "rank-1.txt"}
        found = re.findall(
            rf"^rank (\d) width {width} in {re.escape(os.path.realpath(folder))}$", printed, re.MULTILINE
        )
        assert sorted(found) == ["0", "1"]


# The command, without processes ---------------------------------------------------------------------------------------


@pytest.fixture
def as_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Simulate ``python`` with ``words`` in ``tmp_path`` for a script that then changes the folder."""

    def start(words: list[str], file: Path) -> None:
        main = ModuleType("__main__")
        main.__file__ = os.path.join(tmp_path, file)  # Python does not normalize the path
        main.__spec__ = None
        Path(main.__file__).parent.mkdir(parents=True, exist_ok=True)
        Path(main.__file__).touch()
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "orig_argv", ["python", *words])

    return start


@pytest.mark.parametrize(
    ("words", "mode", "expected"),
    [
        (["-X", "a=b", "train.py"], "RUN", ["-X", "a=b", "train.py", *["hydra.run.dir='/out/it\\'s'", "NULL"]]),
        (
            ["train.py", "lr=1", "-cn", "x"],
            "RUN",
            ["train.py", "lr=1", "hydra.run.dir='/out/it\\'s'", "NULL", "-cn", "x"],
        ),
        (
            ["train.py", "-m", "lr=1,2"],
            "MULTIRUN",
            ["train.py", "-m", "lr=1,2", "hydra.sweep.dir='/start/sweeps'", "NULL"],
        ),
    ],
)
def test_the_command_under_hydra(
    monkeypatch: pytest.MonkeyPatch, as_started: Any, words: list[str], mode: str, expected: list[str]
) -> None:
    as_started(words, Path("train.py"))
    script = words.index("train.py")
    monkeypatch.setattr(sys, "argv", words[script:])
    config = SimpleNamespace(
        mode=SimpleNamespace(name=mode),
        runtime=SimpleNamespace(cwd="/start", output_dir="/out/it's"),
        sweep=SimpleNamespace(dir="sweeps"),
    )
    hydra: Any = ModuleType("hydra.core.hydra_config")
    hydra.HydraConfig = SimpleNamespace(initialized=lambda: True, get=lambda: config)
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", hydra)
    found = command_again()
    assert found.folder == "/start"
    assert found.words[1:] == ["hydra.output_subdir=null" if word == "NULL" else word for word in expected]
