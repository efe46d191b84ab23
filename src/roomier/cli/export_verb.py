"""``roomier export CKPT --to safetensors``: weights for other programs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from roomier import checkpoint
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes
from roomier.export.safetensors import DEFAULT_SHARD_BYTES, DTYPES, export_safetensors

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def run(verb: str, arguments: Sequence[str]) -> int:
    """Write the files and say where they are.

    Raises:
        RoomierError: an option is wrong, the checkpoint is damaged, or the output cannot be written.
    """
    options = _parser(verb).parse_args(list(arguments))
    # A folder of checkpoints, or of runs, means its newest.
    found = checkpoint.find_last(options.checkpoint) if options.checkpoint.is_dir() else None
    path = found or options.checkpoint
    output = options.output or path.with_name(f"{path.resolve().name}-safetensors")
    done = export_safetensors(
        path,
        output,
        max_shard_bytes=_bytes("--max-shard-size", options.max_shard_size),
        dtype=options.dtype,
        prefix=options.prefix,
    )
    print(f"{path} -> {done.folder}: {format_bytes(done.num_bytes)} in {', '.join(done.files)}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise RoomierError("export", "options", message, f"See `{self.prog} --help`")


def _parser(verb: str) -> _Parser:
    parser = _Parser(
        prog=f"roomier {verb}",
        description="Write the weights of a checkpoint for other programs. It takes a few MiB of memory.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint; of a folder of checkpoints or runs, the newest")
    parser.add_argument("--to", required=True, choices=["safetensors"], help="the layout of the Hugging Face hub")
    parser.add_argument("--output", type=Path, help="a new folder; by default the checkpoint's name and -safetensors")
    parser.add_argument("--max-shard-size", default=str(DEFAULT_SHARD_BYTES), help="of one file: 5GB (default), 500MiB")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of all floating-point weights")
    parser.add_argument("--prefix", help="only weights whose names begin so, without it: 'model.'; '' is all")
    return parser


def _bytes(field: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if num_bytes <= 0:
        raise RoomierError(field, text, "is not a size", "Write 5GB (10**9), 500MiB (2**20) or a number of bytes")
    return num_bytes
