"""Rejection of DeepSpeed checkpoints. A script of DeepSpeed can convert them to safetensors files.

The files of these checkpoints are pickles that contain DeepSpeed classes, so reading the files could execute code.
"""

from __future__ import annotations

from pathlib import Path

from roomier.core.errors import CheckpointError

_SCRIPT = "zero_to_fp32.py"  # DeepSpeed and Lightning copy this script into each checkpoint
_SHARDS = ("*_model_states.pt", "*_optim_states.pt")


def refuse_deepspeed_checkpoint(field: str, path: Path) -> None:
    """Reject the folder of a DeepSpeed checkpoint. The error contains the command that converts the weights.

    Raises:
        CheckpointError: ``path`` is a folder that DeepSpeed wrote.
    """
    if not path.is_dir():
        return
    has_shards = any(next(path.glob(f"{folder}{shard}"), None) for folder in ("", "*/") for shard in _SHARDS)
    if (path / "zero").is_dir() and any((path / "zero").glob("*/fp32.pt")):
        problem = "is a universal DeepSpeed checkpoint"
        action = f"Convert the checkpoint from which it was created: {_command(Path('CHECKPOINT'))}"
    elif has_shards or (path / _SCRIPT).is_file():
        problem = "is a DeepSpeed checkpoint, and reading its files could execute code"
        folder = path if (path / _SCRIPT).is_file() or not (path.parent / _SCRIPT).is_file() else path.parent
        action = f"Convert its weights: {_command(folder)}. Then pass weights={str(folder / 'fp32')!r}"
    else:
        return
    raise CheckpointError(field, str(path), problem, action)


def _command(folder: Path) -> str:
    script = folder / _SCRIPT if (folder / _SCRIPT).is_file() or not folder.exists() else Path("DEEPSPEED") / _SCRIPT
    return f"`python {script} {folder} {folder / 'fp32'} --safe_serialization`"
