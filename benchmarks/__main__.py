"""``python -m benchmarks CASE``, in the root of the repository: run one measurement and print its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.cases import CASES, load
from benchmarks.options import known
from roomier.cli.plain_parser import PlainParser
from roomier.core.errors import RoomierError


def main(arguments: Sequence[str]) -> int:
    """Run the measurement. Print one table, or with ``--json`` only JSON, to standard output.

    The JSON output is one object, or one object per line if the result contains ``"lines"``.

    Returns:
        1 if the result lists failed parts under ``"failed"``. 2 after an error, which is printed to standard error.
        Otherwise 0.
    """
    try:
        return _run(list(arguments))
    except RoomierError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, CASES))
        lines = [f"  {name:{width}}  {summary}" for name, summary in CASES.items()]
        print("\n".join(["usage: python -m benchmarks CASE [--json] [options]", "", *lines]))
        return 0
    name = known("benchmark", arguments[0], CASES)
    case = load(name)
    parser = PlainParser(prog=f"python -m benchmarks {name}", description=CASES[name])
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    case.add_arguments(parser)
    options = parser.parse_args(arguments[1:])
    result = case.measure(options)
    if options.json:
        for line in result.get("lines", [result]):
            print(json.dumps(line))
    else:
        Console().print(case.table(result))
    return 1 if result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
