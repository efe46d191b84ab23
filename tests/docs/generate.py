"""Write the pages of the documentation that are derived from the code: ``python -m tests.docs.generate``.

The pages are committed, so that building the site requires neither torch nor roomier. A test fails if a page is stale.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.docs import api, arguments, commands, measurements, versions

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each generated page."""
    for module in (api, arguments, commands, measurements, versions):
        for name, text in module.pages():
            yield DOCS / name, f"{text.strip()}\n"


if __name__ == "__main__":
    for path, text in pages():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(DOCS.parent)}")
