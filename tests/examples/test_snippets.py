"""The snippets run unchanged, and each is short. A few require separate processes."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "snippets"
SNIPPETS = sorted(path.stem for path in FOLDER.glob("*.py"))
STARTS_RANKS = ("sharded",)
SLOW = ("billions",)  # its planning takes twenty seconds


def test_each_is_under_forty_lines() -> None:
    lengths = {name: len((FOLDER / f"{name}.py").read_text().splitlines()) for name in SNIPPETS}
    assert len(lengths) >= 12
    assert {name: length for name, length in lengths.items() if length >= 40} == {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in SNIPPETS
        if name not in STARTS_RANKS
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_snippet_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    if name != "autoencoder":
        assert capsys.readouterr().out.strip(), "it prints its results"


@pytest.mark.parametrize("name", STARTS_RANKS)
def test_a_snippet_runs_on_ranks_that_it_starts(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'zero3': " in done.stdout
