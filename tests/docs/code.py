"""The code of the documentation: each folder of ``docs/code`` holds the files of one page and their output.

Files whose names start with a digit run in this order, in one folder, as a reader would run them. A file whose name
ends in ``_fails`` must exit with an error, and the output of ``_varies`` is not compared, because it depends on the
processor. The output of ``1_fit.sh`` is ``1_fit.out``, which the page includes.
"""

import difflib
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ROOT / "docs" / "code"
TOLERANCE = 0.02  # relative difference of decimal numbers, such as losses, on other processors
TIMEOUT_S = 300

_ENVIRONMENT = {
    "COLUMNS": "100",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",  # standard output and standard error appear in the order of a terminal
    "ROOMIER_PLANNING_S": "400",  # the chosen plan does not depend on the load of the machine
}
# Parts of an output that depend on the machine or the moment. The pages show them; the comparison ignores them.
_MASKS = [
    (re.compile(r"^.*\| ETA .*\n", re.MULTILINE), ""),  # how many lines of progress appear depends on the speed
    (re.compile(r"\b\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?"), "DATE"),
    (re.compile(r"\b\d+:\d\d(:\d\d)?\b"), "TIME"),
    (re.compile(r"\b\d[\d,.]* ?[kKMBG]? ?(\w+/s)\b"), r"RATE \1"),
    (re.compile(r"\b\d[\d,.]* ?(us|ms|s|min|h|seconds?|minutes?|hours?)\b"), "TIME"),
    (re.compile(r"\b(pid|process) \d+"), r"\1 PID"),
    (re.compile(r"\b\d+\.\d%$", re.MULTILINE), "SHARE"),  # of the time, in the table of a profiler
    (re.compile(r"\b\d[\d.]* [KM] (exact|near|approximate)\b"), r"RATE \1"),  # as the time of the same row
    (re.compile(r"-{3,}"), "---"),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" $", re.MULTILINE), ""),
]
_DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")


def pages() -> list[str]:
    """Return the names of the pages that have code."""
    return sorted(folder.name for folder in CODE.iterdir() if folder.is_dir())


def steps(page: str) -> list[Path]:
    """Return the files of a page that run, in their order."""
    files = (CODE / page).glob("[0-9]*")
    return sorted(path for path in files if path.suffix in (".py", ".sh"))


def outputs(page: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """Run the code of a page in ``folder`` and yield each file with its output."""
    for path in (CODE / page).iterdir():
        if path.is_file() and path.suffix != ".out":
            shutil.copy(path, folder)
    for path in steps(page):
        command = ["bash", path.name] if path.suffix == ".sh" else [sys.executable, path.name]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if (done.returncode != 0) != path.stem.endswith("_fails"):
            raise AssertionError(f"{path.relative_to(ROOT)} exits with {done.returncode}:\n{done.stdout}")
        yield path, without_local_paths(done.stdout, folder)


def environment() -> dict[str, str]:
    """Return the environment of the code: a terminal of fixed width and the commands of this Python."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ROOMIER_")}
    return {**own, **_ENVIRONMENT, "PATH": os.pathsep.join([str(Path(sys.executable).parent), own["PATH"]])}


def without_local_paths(text: str, folder: Path) -> str:
    """Replace the paths of this machine by the paths of a reader."""
    packages = "/home/you/.venv/lib/python3/site-packages"
    replaced = {
        str(folder.resolve()): "/home/you/project",
        str(folder): "/home/you/project",
        str(ROOT / "src"): packages,
        sysconfig.get_path("purelib"): packages,
        f" on {socket.gethostname()})": " on node-1)",  # messages that name the process of a rank
    }
    for path, shown in replaced.items():
        text = text.replace(path, shown)
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def expected_output(path: Path) -> str:
    """Return the recorded output of a file, which is empty if the file prints no output."""
    recorded = path.with_suffix(".out")
    return recorded.read_text() if recorded.exists() else ""


def changes(path: Path, output: str) -> str:
    """Return the lines of a file's output that differ from its recorded output; "" if none differ."""
    return "" if path.stem.endswith("_varies") else difference(expected_output(path), output)


def difference(expected: str, actual: str) -> str:
    """Return the lines that differ, without differences that depend on the machine; "" if none differ."""
    before, after = masked(expected).splitlines(), masked(actual).splitlines()
    if len(before) == len(after) and all(map(is_same_line, before, after)):
        return ""
    return "\n".join(difflib.unified_diff(before, after, "recorded", "now", lineterm="", n=1))


def masked(text: str) -> str:
    """Return ``text`` without the parts that depend on the machine or the moment."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text.strip()


def is_same_line(expected: str, actual: str) -> bool:
    """Return True if two lines have equal words and integers, and nearly equal decimal numbers."""
    if _DECIMAL.split(expected) != _DECIMAL.split(actual):
        return False
    numbers = zip(_DECIMAL.findall(expected), _DECIMAL.findall(actual), strict=True)
    return all(abs(float(a) - float(b)) <= TOLERANCE * abs(float(a)) for a, b in numbers)
