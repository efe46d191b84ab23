"""The snippets run unchanged, and each snippet is short. A few require ranks."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more

FOLDER = Path(__file__).parents[2] / "examples" / "snippets"
SNIPPETS = sorted(path.stem for path in FOLDER.glob("*.py"))
REQUIRES_RANKS = ("sharded",)
SLOW = ("billions",)  # planning this model takes twenty seconds


def test_each_is_under_forty_lines() -> None:
    lengths = {name: len((FOLDER / f"{name}.py").read_text().splitlines()) for name in SNIPPETS}
    assert len(lengths) >= 12
    assert {name: length for name, length in lengths.items() if length >= 40} == {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in SNIPPETS
        if name not in REQUIRES_RANKS
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


def run_snippet(name: str) -> None:
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", REQUIRES_RANKS)
def test_a_snippet_runs_on_two_ranks(
    name: str,
    on_ranks: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    on_ranks(2, run_snippet, name, joins=False)
    assert capsys.readouterr().out.count("'zero3': ") == 1
