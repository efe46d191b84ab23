"""``roomier VERB ...``: finds the verb, and turns errors into exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from roomier.core.errors import RoomierError, did_you_mean

EXIT_SUCCESS, EXIT_USER_ERROR = 0, 2


@dataclass(frozen=True)
class Verb:
    """One word behind ``roomier``.

    Attributes:
        summary: one line for ``roomier --help``.
        module: defines ``run(verb, arguments) -> exit code``.
    """

    summary: str
    module: str

    def run(self, name: str, arguments: Sequence[str]) -> int:
        code = import_module(self.module).run(name, arguments)
        assert isinstance(code, int)
        return code


VERBS = {
    "fit": Verb("train a model", "roomier.cli.trainer_verbs"),
    "validate": Verb("measure a model on its validation data", "roomier.cli.trainer_verbs"),
    "test": Verb("measure a model on its test data", "roomier.cli.trainer_verbs"),
    "predict": Verb("run a model over its prediction data", "roomier.cli.trainer_verbs"),
    "plan": Verb("say what each plan costs on a machine, before it runs", "roomier.cli.plan_verb"),
    "report": Verb("hold what was forecast for a run against what it took", "roomier.cli.report_verb"),
    "export": Verb("write a checkpoint, or its model, for other programs", "roomier.cli.export_verb"),
    "hardware": Verb("measure this machine, for planning", "roomier.cli.hardware_verb"),
    "bench": Verb("run a named measurement of roomier itself", "roomier.cli.bench_verb"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the words behind ``roomier``; by default those of this process.

    Returns:
        0, or 2 where what was asked for is wrong: one message on standard error says what and what to do.

    Raises:
        SystemExit: a signal ended a run, which was saved first; 128 + the number of the signal.
        Exception: what the user's code raised, with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(help_text())
        return EXIT_SUCCESS
    if name == "--version":
        print(f"roomier {version('roomier')}")
        return EXIT_SUCCESS
    try:
        if name not in VERBS:
            raise RoomierError("verb", name, "is not a verb of roomier", did_you_mean(name, VERBS))
        return VERBS[name].run(name, arguments[1:])
    except RoomierError as error:
        if _is_worth_telling(error):
            notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
            print(f"roomier: error: {error}{notes}{_place_in_user_code(error)}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def help_text() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: roomier VERB [options]",
            "",
            "Train PyTorch models that do not fit: one Trainer, one strategy flag, planned before it runs.",
            "",
            *lines,
            "",
            "roomier VERB --help tells the options of a verb; roomier --version the version.",
            "",
            "  roomier fit --model my_package.MyModule --model.lr 0.1 --data my_package.MyData --trainer.max_steps 100",
            "  roomier fit --config run.yaml --ckpt_path last",
        ]
    )


def _is_worth_telling(error: RoomierError) -> bool:
    """Whether no other rank has told it already; where several were never thought of, there is no need to ask."""
    group = sys.modules.get("roomier.launch.group")
    return group is None or bool(group.is_worth_telling(error))


def _place_in_user_code(error: RoomierError) -> str:
    """Where the user's own code stood, if it did: the innermost frame outside all libraries."""
    roomier_folder = str(Path(__file__).parents[1])
    library_folders = (roomier_folder, sys.base_prefix, sys.prefix, "<")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(library_folders)
    ]
    return f"\n  at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
