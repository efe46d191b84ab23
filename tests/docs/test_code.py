"""The code of the documentation runs and prints the output that the pages show."""

from pathlib import Path

import pytest

from tests.docs.code import ROOT, changes, difference, outputs, pages

IN_MAKE_TEST = ("errors", "install", "ten_lines")
"""Pages whose code runs in ``make test`` and ``make docs``. The code of the other pages runs in ``make test-more``."""

WITH_SERVICES = {"ray_train": ("ray", "pyarrow"), "sweeps": ("optuna", "ray")}
"""Pages whose code needs packages of the extra `services`, and these packages."""

SLOW = [
    "first_project",
    "long_sequences",
    "plan",
    "less_memory",
    "growing_memory",
    "stages",
    "fine_tune",
    "from_hugging_face",
]
"""Pages whose code takes about a minute. The test of the package runs the first project without comparing outputs."""


def mark_of(page: str) -> list[pytest.MarkDecorator]:
    """Return the mark that selects the command that runs a page."""
    if page in WITH_SERVICES:
        return [pytest.mark.services]
    return [] if page in IN_MAKE_TEST else [pytest.mark.slow if page in SLOW else pytest.mark.more]


PAGES = [pytest.param(page, marks=mark_of(page)) for page in pages()]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_prints_the_output_on_the_page(page: str, tmp_path: Path) -> None:
    for package in WITH_SERVICES.get(page, ()):
        pytest.importorskip(package, reason=f"{package} is not installed (pip install 'roomier[services]')")
    for path, output in outputs(page, tmp_path):
        changed = changes(path, output)
        assert not changed, f"python -m tests.docs.record {page}: {path.relative_to(ROOT)}\n{changed}"


def test_only_words_and_numbers_that_do_not_depend_on_the_machine_are_compared() -> None:
    recorded = (
        "epoch 1/2 | step 9/20 | 678 it/s | ETA 0:01\nloss 0.500 after 3 steps in 0:02 at 2.1k tokens/s (1.5 s)\n"
    )
    assert difference(recorded, "loss 0.505 after 3 steps in 0:12 at 900 tokens/s (15.0 s)\n") == ""
    for wrong in ("loss 0.600 after 3 steps", "loss 0.500 after 4 steps", "loss 0.500 before 3 steps"):
        changed = difference(recorded, recorded.replace("loss 0.500 after 3 steps", wrong))
        assert f"+{wrong}" in changed
    assert difference(recorded, "") != ""
