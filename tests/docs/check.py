"""Check the built site: ``python -m tests.docs.check SITE``.

Links and anchors must exist, the reference must contain every public name, and the search must find it. The builders
check the links of the Markdown files; this check covers all links, such as the links of the reference. It requires only
the standard library, because the tools of the site are installed without roomier.
"""

import functools
import json
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.docs.exported import SOURCES, exported_names

BASE = "/roomier/"
"""Path of ``site_url`` in mkdocs.yml, with which the page 404.html begins its links."""

SEARCHED = ("out of memory", "resume", "Hugging Face", "SLURM", "precision")
"""Phrases that the search must find."""


class Page(HTMLParser):
    """The anchors and the links of a page.

    Attributes:
        anchors: values of ``id`` and ``name``.
        links: values of ``href`` and ``src``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchors and links of an element."""
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


@functools.cache
def page_of(path: Path) -> Page:
    """Return the page in the file ``path``."""
    return Page(path)


def broken_links(site: Path) -> Iterator[str]:
    """Yield the links within the site whose file or anchor does not exist."""
    for path in sorted(site.rglob("*.html")):
        for link in page_of(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = _target(site, path, unquote(parts.path))
            where = f"{path.relative_to(site)}: {link}"
            if not target.is_file():
                yield f"{where}: the file does not exist"
            elif parts.fragment and not _has_anchor(target, unquote(parts.fragment)):
                yield f"{where}: the anchor does not exist"


def _has_anchor(target: Path, anchor: str) -> bool:
    return target.suffix != ".html" or anchor in page_of(target).anchors


def _target(site: Path, page: Path, link: str) -> Path:
    if not link:
        return page
    target = site / link.removeprefix(BASE) if link.startswith(BASE) else page.parent / link
    return (target / "index.html" if target.is_dir() else target).resolve()


def undocumented_names(site: Path, sources: Path = SOURCES) -> Iterator[str]:
    """Yield the public names that the inventory of the reference does not contain."""
    content = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(content.split(b"\n", 4)[4]).decode().splitlines()
    documented = {line.split(" ")[0] for line in lines}
    for module, names in exported_names(sources).items():
        yield from (f"{module}.{name} has no entry" for name in names if f"{module}.{name}" not in documented)


def unfound_phrases(site: Path) -> Iterator[str]:
    """Yield the phrases that the index of the search does not contain."""
    items = json.loads((site / "search.json").read_text())["items"]
    texts = [f"{item['title']} {item['text']}".lower() for item in items]
    for phrase in SEARCHED:
        if not any(phrase.lower() in text for text in texts):
            yield f"the search finds no result for {phrase!r}"


def problems(site: Path, sources: Path = SOURCES) -> list[str]:
    """Return the problems of the site in ``site``."""
    return [*broken_links(site), *undocumented_names(site, sources), *unfound_phrases(site)]


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "All links, anchors and public names of the site exist.")
    sys.exit(bool(found))
