"""``roomier export CKPT --to safetensors`` or ``hugging-face``: weights for other programs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from roomier import checkpoint
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes
from roomier.export.hugging_face import export_hugging_face
from roomier.export.safetensors import DEFAULT_SHARD_BYTES, DTYPES, Exported, export_safetensors

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
    output = options.output or path.with_name(f"{path.resolve().name}-{options.to}")
    shard_bytes = _bytes("--max-shard-size", options.max_shard_size)
    if options.to == "hugging-face":
        done = _hugging_face(path, output, shard_bytes, options)
    else:
        _refuse(options, "processor", "adapters")
        done = export_safetensors(path, output, max_shard_bytes=shard_bytes, dtype=options.dtype, prefix=options.prefix)
    print(f"{path} -> {done.folder}: {format_bytes(done.num_bytes)} in {', '.join(done.files)}")
    return 0


def _hugging_face(path: Path, output: Path, shard_bytes: int, options: argparse.Namespace) -> Exported:
    _refuse(options, "prefix")
    return export_hugging_face(
        path,
        output,
        max_shard_bytes=shard_bytes,
        dtype=options.dtype,
        processor=options.processor,
        adapters=options.adapters or "merged",
    )


def _refuse(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None:
            raise RoomierError(f"--{name}", value, f"does not go with --to {options.to}", "Leave it out")


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
    parser.add_argument(
        "--to",
        required=True,
        choices=["safetensors", "hugging-face"],
        help="safetensors: weights under the names they have in the model. hugging-face: what save_pretrained writes "
        "and from_pretrained opens",
    )
    parser.add_argument("--output", type=Path, help="a new folder; by default the checkpoint's name and that of --to")
    parser.add_argument("--max-shard-size", default=str(DEFAULT_SHARD_BYTES), help="of one file: 5GB (default), 500MiB")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of all floating-point weights")
    parser.add_argument("--prefix", help="only weights whose names begin so, without it: 'model.'; '' is all")
    parser.add_argument(
        "--processor", type=Path, help="hugging-face: the folder of a tokenizer or processor, to go along"
    )
    parser.add_argument(
        "--adapters", choices=["merged", "alone"], help="hugging-face: into the weights, or as a folder for peft"
    )
    return parser


def _bytes(field: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if num_bytes <= 0:
        raise RoomierError(field, text, "is not a size", "Write 5GB (10**9), 500MiB (2**20) or a number of bytes")
    return num_bytes
