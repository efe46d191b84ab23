"""The generated pages of the documentation are current."""

import sys

import pytest

from tests.docs import generate

OF_PYTHON = (3, 11)
"""Version of Python with which ``cli.md`` was written. Other versions of argparse format the help differently."""


def test_generated_pages_are_current() -> None:
    pages = dict(generate.pages())
    if sys.version_info[:2] != OF_PYTHON:
        del pages[generate.DOCS / "reference" / "cli.md"]
    stale = [path.name for path, text in pages.items() if not path.exists() or path.read_text() != text]
    assert not stale, f"run python -m tests.docs.generate, and commit {stale}"
    written = set((generate.DOCS / "reference" / "api").glob("*.md"))
    assert written <= pages.keys(), "remove the pages of removed modules"


@pytest.mark.parametrize("page", ["trainer.md", "plan.md"])
def test_arguments_and_fields_have_a_type_or_default_and_text(page: str) -> None:
    text = dict(generate.pages())[generate.DOCS / "reference" / page]
    entries = text.split("\n### ")[1:]
    assert len(entries) > 40
    for entry in entries:
        name, description, facts = entry.split("\n\n")[:3]
        assert description.strip().endswith("."), name
        assert "Default: `" in facts, name
