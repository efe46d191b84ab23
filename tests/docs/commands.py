"""The page ``reference/cli.md``: the verbs of ``roomier`` with their help texts."""

import contextlib
import io
import os
from collections.abc import Iterator

from roomier.cli.help_screen import TOPICS
from roomier.cli.main import VERBS, main
from tests.docs.markdown import table

_LIKE_FIT = ("validate", "test", "predict")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the page."""
    rows = [(f"[`roomier {verb}`](#{verb})", summary) for verb, (summary, _) in VERBS.items()]
    parts = [
        "# Command line",
        "`roomier VERB [options]` runs one of the following commands:",
        table(("command", "purpose"), rows),
        "`--help` shows the most common options of a command, `--help=TOPIC` the options of a topic, and "
        "`--help=OPTION` one option. For the values and defaults of the options that begin with `--trainer.`, see "
        "[Trainer arguments](trainer.md); for the exit codes of all commands, see [Exit codes](exit_codes.md).",
    ]
    for verb, (summary, _) in VERBS.items():
        parts.append(f"## {verb}")
        if verb in _LIKE_FIT:
            parts.append(f"To {summary}, run `roomier {verb}` with the options of [`roomier fit`](#fit).")
            continue
        parts.append(_shown(verb, "--help"))
        if verb == "fit":
            parts += [f"The topic `run` describes {TOPICS['run'].about}:", _shown(verb, "--help=run")]
        if verb == "plan":
            parts += [f"The topic `plan` describes {TOPICS['plan'].about}:", _shown(verb, "--help=plan")]
    yield "reference/cli.md", "\n\n".join(parts)


def _shown(*arguments: str) -> str:
    """Return a command and its output as blocks of code."""
    output = io.StringIO()
    os.environ["COLUMNS"] = "100"  # the width that argparse uses
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
        main(arguments)
    lines = "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())
    return f"```bash\nroomier {' '.join(arguments)}\n```\n\n```text\n{lines}\n```"
