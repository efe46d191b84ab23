"""``python -m benchmarks drift``, on a small git repository whose commits print different results."""

import argparse
import io
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import drift
from roomier.core.errors import RoomierError

PROGRAM = """
import json, sys
from pathlib import Path
version, log = {version!r}, Path({log!r})
words = sys.argv[1:] if version == 2 else sys.argv[2:]  # the first commit has the verb "bench"
log.write_text(log.read_text() + f"{{version}} {{' '.join(words)}}\\n")
if "--fail" in sys.argv:
    sys.exit("this option is unknown")
if words[0] == "overhead":
    result = {{"case": "overhead", "overhead_us": 40.0 + version, "overhead_cpu_us": 30.0, "calls_per_step": 50,
               "lightning": {{"overhead_us": 400.0}}}}
else:
    rows = [{{"strategy": "zero1", "step_s": 0.5 * version, "ratio_to_torch_ddp": 1.0, "peak_bytes": 8}}]
    result = {{"case": "strategies", "rows": rows}}
print(json.dumps(result))
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A repository with versions 1 and 2 of a program, and the file to which each run appends a line."""
    folder, log = tmp_path / "repository", tmp_path / "log"
    log.touch()
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    for version, package in ((1, folder / "src" / "roomier"), (2, folder / "benchmarks")):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(PROGRAM.format(version=version, log=str(log)))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", str(version)], check=True)
    monkeypatch.setattr(drift, "_ROOT", folder)
    return folder, log


def worktrees(folder: Path) -> int:
    listed = subprocess.run(["git", "-C", str(folder), "worktree", "list"], check=True, capture_output=True, text=True)
    return len(listed.stdout.splitlines())


def test_commits_run_in_turns_and_are_compared(
    repository: tuple[Path, Path], bench: Callable[..., dict[str, Any]]
) -> None:
    folder, log = repository
    result = bench("drift", "--json", "--against", "HEAD~1", "--rounds", "2", "--overhead", "--steps 7")
    rows = {row["value"]: row for row in result["rows"]}
    assert rows["overhead_us"] == {
        "value": "overhead_us",
        "before": 41.0,
        "now": 42.0,
        "ratio": pytest.approx(42 / 41, abs=1e-3),
        "before_all": [41.0, 41.0],
        "now_all": [42.0, 42.0],
    }
    assert rows["ratio_to_lightning"]["now"] == pytest.approx(0.105)
    assert rows["zero1 step_s"]["ratio"] == 2.0
    ran = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    assert [version for version, _ in ran] == ["2", "2", "1", "1", "1", "1", "2", "2"]
    assert ran[0][1] == "overhead --json --steps 7"
    assert ran[1][1].startswith("strategies --json --model mingpt")
    assert len(result["against"]) == 40
    assert worktrees(folder) == 1, "the temporary worktree is removed"
    table = io.StringIO()
    Console(file=table, width=100).print(drift.table(result))
    assert "zero1 step_s" in table.getvalue()


def test_failed_benchmarks_and_unknown_commits_are_errors(repository: tuple[Path, Path]) -> None:
    options = argparse.Namespace(against="HEAD", rounds=1, overhead="--fail", strategies="none")
    with pytest.raises(RoomierError, match="this option is unknown"):
        drift.measure(options)
    options.against = "no-such-commit"
    with pytest.raises(RoomierError, match="git failed"):
        drift.measure(options)
    assert worktrees(repository[0]) == 1
