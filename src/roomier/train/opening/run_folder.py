"""Where a run keeps what it writes: ``version_N`` under ``default_root_dir``."""

from pathlib import Path

from roomier.core.errors import CheckpointError
from roomier.loggers.files import replacing

PREFIX = "version_"


def is_run_folder(folder: Path) -> bool:
    return folder.name.startswith(PREFIX) and folder.name[len(PREFIX) :].isdecimal()


def run_folder(root: Path, resumed: Path | None) -> Path:
    """The folder of a run: that of the checkpoint it goes on from, else a new ``version_N`` under ``root``.

    Raises:
        CheckpointError: it cannot be made.
    """
    # Checkpoints of Lightning are files, and their folder is Lightning's.
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
            except FileExistsError:  # another process was quicker
                continue
    except OSError as error:
        raise CheckpointError(
            "default_root_dir",
            str(root),
            f"no run folder can be made there ({error.strerror})",
            "Pass a folder you can write to",
        ) from error


def write_plan(folder: Path, text: str) -> None:
    """Write ``plan.yaml``, the old one or the new one being there at every moment.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        with replacing(folder / "plan.yaml") as file:
            file.write(text)
    except OSError as error:
        raise CheckpointError(
            "default_root_dir",
            str(folder.parent),
            f"plan.yaml cannot be written to {folder.name} there ({error.strerror})",
            "Free space, or pass another folder",
        ) from error
