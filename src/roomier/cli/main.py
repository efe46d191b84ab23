"""``roomier VERB ...``: run the verb, and convert errors to exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from roomier.core.errors import RoomierError, did_you_mean

EXIT_SUCCESS, EXIT_USER_ERROR = 0, 2


# For each verb, one line for ``roomier --help``, and the module that defines ``run(verb, arguments) -> exit code``.
VERBS = {
    "fit": ("train a model", "roomier.cli.trainer_verbs"),
    "validate": ("evaluate a model on its validation data", "roomier.cli.trainer_verbs"),
    "test": ("evaluate a model on its test data", "roomier.cli.trainer_verbs"),
    "predict": ("run a model on its prediction data", "roomier.cli.trainer_verbs"),
    "plan": ("forecast the memory and the time of each plan on a machine", "roomier.cli.plan_verb"),
    "launch": ("print the manifest of a job for SLURM, Kubernetes or a cloud", "roomier.cli.launch_verb"),
    "report": ("compare runs, or the forecast of a run with its measurement", "roomier.cli.report_verb"),
    "export": ("export a checkpoint, or its model, for other programs", "roomier.cli.export_verb"),
    "hardware": ("measure this machine for planning", "roomier.cli.hardware_verb"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments after ``roomier``; by default the arguments of this process.

    Returns:
        The exit code of the verb: 0, or 1 if ``plan`` finds no plan that fits. 2 after a RoomierError, which is printed
        to standard error.

    Raises:
        SystemExit: a signal terminated a run after its state was saved. In this case, the exit code is 128 plus the
            number of the signal.
        Exception: any exception from the user's code, with its traceback.
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
        code = import_module(VERBS[name][1]).run(name, arguments[1:])
        assert isinstance(code, int)
        return code
    except RoomierError as error:
        if _is_first_report(error):
            notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
            print(f"roomier: error: {error}{notes}{_place_in_user_code(error)}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def help_text() -> str:
    """Return the text of ``roomier --help``."""
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {summary}" for name, (summary, _) in VERBS.items()]
    return "\n".join(
        [
            "usage: roomier VERB [options]",
            "",
            "Train PyTorch models that do not fit into memory: one Trainer, one strategy flag, and a plan before each "
            "run.",
            "",
            *lines,
            "",
            "roomier VERB --help shows the most common options of a verb. roomier fit --help=memory shows one topic.",
            "roomier --version shows the version.",
            "",
            "  roomier fit --model my_package.MyModule --model.lr 0.1 --data my_package.MyData --trainer.max_steps 100",
            "  roomier fit --config run.yaml --ckpt_path last",
        ]
    )


def _is_first_report(error: RoomierError) -> bool:
    """Return True if no other rank has reported this error. Runs on a single rank never import roomier.launch.group."""
    group = sys.modules.get("roomier.launch.group")
    return group is None or bool(group.should_report(error))


def _place_in_user_code(error: RoomierError) -> str:
    """Return the innermost frame of the traceback that is not in a library, or an empty string if there is no such
    frame."""
    roomier_folder = str(Path(__file__).parents[1])
    library_folders = (roomier_folder, sys.base_prefix, sys.prefix, "<")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(library_folders)
    ]
    return f"\n  at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
