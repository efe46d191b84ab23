"""The folder to which a run writes its files: ``version_N`` under ``default_root_dir``."""

from pathlib import Path

from roomier.core.errors import CheckpointError
from roomier.core.replacing import replacing

PREFIX = "version_"


def is_run_folder(folder: Path) -> bool:
    """Return True if the name of ``folder`` consists of ``version_`` and a number."""
    return folder.name.startswith(PREFIX) and folder.name[len(PREFIX) :].isdecimal()


def run_folder(root: Path, resumed: Path | None) -> Path:
    """Return the run folder, which is the folder of the checkpoint ``resumed`` or a new ``version_N`` under ``root``.

    Raises:
        CheckpointError: the folder cannot be created.
    """
    # A Lightning checkpoint is a file in a folder that Lightning created, so the run uses a new folder.
    is_own = resumed is not None and not resumed.is_file()
    if resumed is not None and is_own and resumed.parent.parent.parent.resolve() == root.resolve():
        return resumed.parent.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            taken = [int(path.name[len(PREFIX) :]) for path in root.iterdir() if is_run_folder(path)]
            folder = root / f"{PREFIX}{max(taken, default=-1) + 1}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another process created this folder first
                continue
    except OSError as error:
        problem = f"no run folder can be created in this folder ({error.strerror})"
        raise CheckpointError("default_root_dir", str(root), problem, "Pass a folder with write permission") from error


def write_plan(folder: Path, text: str) -> None:
    """Write ``plan.yaml`` atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        with replacing(folder / "plan.yaml") as file:
            file.write(text)
    except OSError as error:
        problem = f"plan.yaml cannot be written to {folder.name} in this folder ({error.strerror})"
        action = "Free some space, or pass another folder"
        raise CheckpointError("default_root_dir", str(folder.parent), problem, action) from error
