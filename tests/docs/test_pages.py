"""The pages show code and output of included files, which the tests run."""

import re
from pathlib import Path

from tests.docs.code import CODE, ROOT, steps
from tests.docs.code import pages as pages_with_code

DOCS = ROOT / "docs"
MAX_INLINE_BLOCKS = 40
"""Blocks of code that are too short to run alone, such as a signature or a few changed lines."""

_INCLUDE = re.compile(r'--8<-- "([^":]+)')
_BLOCK = re.compile(r"^ *```(?:bash|python|yaml|diff|console)\b.*?\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_TYPED_BY_HAND = ("start", "how_to", "coming_from", "troubleshooting", "concepts")


def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in DOCS.rglob("*.md")}


def test_code_is_included_in_a_page() -> None:
    included = {name for text in texts().values() for name in _INCLUDE.findall(text)}
    shown = {f"{page}/{path.name}" for page in pages_with_code() for path in steps(page)}
    assert shown
    assert shown <= included


def test_recorded_outputs_belong_to_code() -> None:
    outputs = {path.with_suffix("") for path in CODE.rglob("*.out")}
    assert outputs <= {path.with_suffix("") for page in pages_with_code() for path in steps(page)}


def test_few_blocks_of_code_are_not_run() -> None:
    inline = [
        block
        for path, text in texts().items()
        if path.relative_to(DOCS).parts[0] in _TYPED_BY_HAND
        for block in _BLOCK.findall(text)
        if "--8<--" not in block
    ]
    assert len(inline) <= MAX_INLINE_BLOCKS
    assert all(len(block.splitlines()) <= 15 for block in inline), "move longer code to docs/code, where it is run"


def test_pages_have_no_marks_of_a_merge() -> None:
    assert not [path for path, text in texts().items() if re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE)]
