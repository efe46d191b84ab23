"""The ``roomier`` command: verbs, exit codes and error message."""

import subprocess
import sys
from pathlib import Path

import pytest

from roomier.cli.main import VERBS, main

ROOMIER = str(Path(sys.executable).with_name("roomier"))


def test_help_shows_exactly_the_existing_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed[: len(VERBS)] == [
        "fit",
        "validate",
        "test",
        "predict",
        "plan",
        "launch",
        "report",
        "export",
        "hardware",
    ]


@pytest.mark.parametrize("command", [[ROOMIER], [sys.executable, "-m", "roomier"]], ids=["installed", "module"])
def test_command_prints_its_version(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "roomier"
    assert done.stderr == ""


def test_help_imports_neither_torch_nor_the_option_parser() -> None:
    # roomier/__init__.py may import torch, but the command must not import other large packages.
    code = (
        "import roomier, sys; before = set(sys.modules); from roomier.cli.main import main; main(['--help']); "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "jsonargparse" not in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fti"], ["verb='fti'", "Did you mean 'fit'?"]),
        (
            ["sail"],
            ["verb='sail'", "Use one of: export, fit, hardware, launch, plan, predict, report, test, validate"],
        ),
    ],
)
def test_invalid_word_gives_one_message_and_exit_code_2(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("roomier: error: ")
    assert output.err.count("\n") == 1
    for text in expected:
        assert text in output.err
