"""``roomier bench``: print the command of the benchmarks, which the package does not contain."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

_NOT_RUN = 2


def run(verb: str, arguments: Sequence[str]) -> int:
    """Print the command that runs the benchmark, and return an exit code for a command that ran nothing."""
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    print(
        f"Benchmarks are not part of the package. In a clone of roomier's repository, run: {command}", file=sys.stderr
    )
    return _NOT_RUN
