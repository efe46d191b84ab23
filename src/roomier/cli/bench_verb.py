"""``roomier bench CASE``: run one measurement and print its result."""

from __future__ import annotations

import json
from collections.abc import Sequence

from roomier.bench.cases import CASES
from roomier.cli.plain_parser import PlainParser
from roomier.core.errors import RoomierError, did_you_mean


def run(verb: str, arguments: Sequence[str]) -> int:
    """Run the measurement. Print one table, or with ``--json`` only JSON, to standard output.

    The JSON output is one object, or one object per line if the result contains ``"lines"``.

    Returns:
        1 if the result lists failed parts under ``"failed"``, otherwise 0.

    Raises:
        RoomierError: the benchmark or an option is unknown.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text())
        return 0
    name = arguments[0]
    if name not in CASES:
        raise RoomierError("bench", name, "is not a benchmark", did_you_mean(name, CASES))
    case = CASES[name].load()
    parser = PlainParser(prog=f"roomier {verb} {name}", description=CASES[name].summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    case.add_arguments(parser)
    options = parser.parse_args(list(arguments[1:]))
    result = case.measure(options)
    if options.json:
        for line in result.get("lines", [result]):
            print(json.dumps(line))
    else:
        from rich.console import Console

        Console().print(case.table(result))
    return 1 if result.get("failed") else 0


def _help_text() -> str:
    width = max(map(len, CASES))
    lines = [f"  {name:{width}}  {case.summary}" for name, case in CASES.items()]
    return "\n".join(["usage: roomier bench CASE [--json] [options]", "", *lines])
