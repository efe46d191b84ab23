"""Command that started this process, and its working folder. The other ranks of this machine run the same command.

[Note: folders]
Relative paths on a command line refer to the working folder of the process at its start. A script may change its folder
before it starts the ranks, or even before it imports roomier. The other ranks start in the original folder and run the
same script, so they change the folder in the same way as rank 0. As a result, relative paths have the same meaning on
all ranks.

[Note: Hydra]
``@hydra.main`` derives the name of an output folder from the current time and can change the working folder to this
folder. Each rank could therefore derive a different folder. To avoid this, roomier starts the other ranks with the
output folder of rank 0. Only rank 0 writes Hydra's copy of the configuration.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.start_folder import FOLDER_AT_IMPORT

_STANDARD_LIBRARY = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        words: path of the interpreter, followed by its arguments.
        folder: folder in which the command runs; None means the current folder.
    """

    words: list[str]
    folder: str | None


def command_again(devices: int = 2) -> Command:
    """Return the command that started this process.

    Args:
        devices: number of ranks on this machine, for error messages.

    Raises:
        RoomierError: the command cannot be run again.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    problem = None
    if "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        problem = "a notebook or an interactive session cannot start further ranks"
    elif multiprocessing.parent_process() is not None:
        problem = "a process of multiprocessing cannot start further ranks"
    elif "PYTEST_CURRENT_TEST" in os.environ and "pytest" in sys.modules:
        problem = "under pytest, further ranks would run the tests again"
    elif file is None or not _can_be_read_again(file):
        problem = "code from `python -c` or from standard input cannot be run again by further ranks"
    if problem is not None:
        action = (
            "Move the run to a script, and start it with `python script.py` or `torchrun --nproc-per-node=N script.py`"
        )
        raise RoomierError("devices", devices, problem, action)
    words = [sys.executable, *sys.orig_argv[1:]]
    # The configuration of Hydra itself if this process runs a function under ``@hydra.main``; otherwise,
    # None.
    module = sys.modules.get("hydra.core.hydra_config")
    hydra = module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None
    if hydra is None:
        return Command(words, _start_folder())
    return Command(_with_overrides(words, _same_output_folder(hydra)), hydra.runtime.cwd)


def _can_be_read_again(file: str) -> bool:
    """Return whether ``file`` can be read more than once. Standard input, pipes and devices cannot be read
    again."""
    if file.startswith(("<", "/dev/", "/proc/")):
        return False
    is_in_archive_or_removed = not os.path.exists(file)
    return os.path.isfile(file) or is_in_archive_or_removed


def _start_folder() -> str | None:
    """Return the folder in which this process was started; None if it no longer exists. See [Note: folders]."""
    found = _folder_of_script() or FOLDER_AT_IMPORT
    return found if found is not None and os.path.isdir(found) else None


def _folder_of_script() -> str | None:
    """Return the folder to which the script's path on the command line is relative; None if the path is absolute or not
    found.

    Python makes ``__file__`` of a script absolute without normalizing it, so ``__file__`` ends with the path on the
    command line.
    """
    main = sys.modules["__main__"]
    file, spec = main.__file__ or "", main.__spec__
    if spec is not None and spec.name != "__main__":
        return _folder_of_module(file.removesuffix(os.path.join(*spec.name.split(".")) + ".py").rstrip(os.sep))
    for word in filter(None, sys.orig_argv[1:]):
        # Python can also run a folder or an archive that contains __main__.py.
        for path in (word, os.path.join(word, "__main__.py")):
            if file == path:
                return None
            if file.endswith(os.sep + path):
                return file.removesuffix(path)
    return None


def _folder_of_module(root: str) -> str | None:
    """Return the folder in which ``python -m`` was started; None if it cannot be determined from ``sys.path``.

    ``python -m`` inserts the folder into ``sys.path`` before the entries of PYTHONPATH and of the standard library. The
    script may have inserted additional entries.

    Args:
        root: entry of ``sys.path`` in which the module was found.
    """
    first = next((at for at, entry in enumerate(sys.path) if entry in _STANDARD_LIBRARY), 0)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [] if sys.flags.safe_path else [entry for entry in sys.path[:first] if entry not in given]
    if root in entries:
        return root
    return entries[0] if len(entries) == 1 else None


def _same_output_folder(hydra: Any) -> list[str]:
    """Return the overrides that give another process the output folder of this process. See [Note: Hydra]."""
    if hydra.mode.name == "MULTIRUN":
        name, folder = "hydra.sweep.dir", os.path.join(hydra.runtime.cwd, hydra.sweep.dir)
    else:
        name, folder = "hydra.run.dir", hydra.runtime.output_dir
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    return [f"{name}='{quoted}'", "hydra.output_subdir=null"]


def _with_overrides(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Insert ``overrides`` after the last override in ``words``, because Hydra cannot parse two separate groups of
    overrides."""
    first = len(words) - len(sys.argv) + 1  # the words before the script belong to the interpreter
    places = [place for place in range(first, len(words)) if "=" in words[place] and not words[place].startswith("-")]
    end = places[-1] + 1 if places else len(words)
    return [*words[:end], *overrides, *words[end:]]
