"""``make docs`` fails for a broken link, a broken anchor, an undocumented name and a wrong output."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.check import broken_links, undocumented_names, unfound_phrases
from tests.docs.code import ROOT

TOOLS = ROOT / ".cache" / "docs"
COPIED = ("docs", "src/roomier", "tests/docs")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files that the site is built from."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "Makefile"):
        shutil.copy2(ROOT / name, tmp_path)
    return tmp_path


def problems_of(project: Path, *targets: str) -> tuple[int, str]:
    """Run parts of ``make docs`` with the tools of this clone, which make installs if necessary, and with the code of
    the page on errors. Return the exit code and the output."""
    settings = [f"DOCS={TOOLS}", f"BIN={Path(sys.executable).parent}"]
    tests = "DOCS_TESTS=tests/docs/test_code.py -k errors -p no:cacheprovider"
    command = ["make", "--keep-going", *targets, *settings, tests]
    environment = {**os.environ, "PYTHONPATH": str(project / "src"), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.more
def test_make_docs_fails_and_reports_all_problems(project: Path) -> None:
    with (project / "docs" / "glossary.md").open("a") as page:
        page.write("\n[link](missing.md), [link](seeds.md#missing)\n")
    module = project / "src" / "roomier" / "adapters.py"
    module.write_text(module.read_text().replace('__all__ = ["', '__all__ = ["undocumented", "'))
    output = project / "docs" / "code" / "errors" / "1_error.out"
    output.write_text(output.read_text().replace("zero3", "zero2"))
    messages = {
        "site": (
            "glossary.md' contains a link 'missing.md'",
            "'seeds.md#missing', but the doc",
            "roomier.adapters.undocumented has no entry",
        ),
        "docs-code": ("+strategy='zero4': is unknown. Did you mean 'zero3'?",),
    }
    for target, expected in messages.items():
        code, printed = problems_of(project, target)
        assert code != 0
        assert [each for each in expected if each not in printed] == []


@pytest.mark.slow  # CI runs the same command
def test_make_docs_passes_without_a_change(project: Path) -> None:
    code, output = problems_of(project, "site", "docs-code")
    assert code == 0, output
    assert "All links, anchors and public names of the site exist." in output


def test_the_check_finds_broken_links_anchors_and_missing_names(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text('<h2 id="a"></h2><a href="#a"></a><a href="#b"></a><img src="no.png"><a href="https://x.org"></a>')
    assert [each.partition(": ")[2] for each in broken_links(tmp_path)] == [
        "#b: the anchor does not exist",
        "no.png: the file does not exist",
    ]
    (tmp_path / "search.json").write_text('{"items": [{"title": "Resume", "text": "precision, SLURM"}]}')
    assert list(unfound_phrases(tmp_path)) == [
        "the search finds no result for 'out of memory'",
        "the search finds no result for 'Hugging Face'",
    ]
    header = b"# Sphinx inventory version 2\n# Project: x\n# Version: 1\n# zlib\n"
    (tmp_path / "objects.inv").write_bytes(header + b"x\x9c\x03\x00\x00\x00\x00\x01")  # an empty inventory
    assert "roomier.Trainer has no entry" in list(undocumented_names(tmp_path))
