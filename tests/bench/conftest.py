"""Fixture that runs a benchmark of the command ``python -m benchmarks`` in the process of the tests."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest

from benchmarks.__main__ import main


@pytest.fixture(scope="session")
def bench() -> Callable[..., dict[str, Any]]:
    """Call ``bench(*words)``. The function returns the JSON object that ``python -m benchmarks`` prints for these
    words."""

    def run(*words: str) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
            patch.setattr(sys, "argv", ["__main__.py", *words])
            assert main(words) == 0
        found: dict[str, Any] = json.loads(printed.getvalue())  # fails if the output contains other text
        return found

    return run
