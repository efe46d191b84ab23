"""Record the output of the code of the documentation: ``python -m tests.docs.record [PAGE...]``.

A recorded output that differs only in times, rates and other parts that depend on the machine stays as it is.
"""

import sys
import tempfile
from pathlib import Path

from tests.docs.code import ROOT, difference, expected_output, outputs, pages


def record(page: str) -> None:
    """Run the code of a page, write the outputs that changed, and print the names of their files."""
    with tempfile.TemporaryDirectory() as folder:
        for path, output in outputs(page, Path(folder)):
            recorded = path.with_suffix(".out")
            if not output:
                recorded.unlink(missing_ok=True)
            elif not recorded.exists() or difference(expected_output(path), output):
                recorded.write_text(output)
                print(f"recorded {recorded.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    for page in sys.argv[1:] or pages():
        record(page)
