"""``roomier export CHECKPOINT --to FORMAT OUT``: export a checkpoint for other programs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from roomier import checkpoint
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.export.hub import check_hub, push_to_hub
from roomier.checkpoint.export.hugging_face import export_hugging_face
from roomier.checkpoint.export.lightning_file import export_lightning
from roomier.checkpoint.export.onnx import export_onnx
from roomier.checkpoint.export.plain import plain_model
from roomier.checkpoint.export.safetensors import DEFAULT_SHARD_BYTES, DTYPES, export_safetensors
from roomier.checkpoint.export.torch_export import export_torch
from roomier.checkpoint.export.torchscript import export_torchscript
from roomier.checkpoint.lightning import is_lightning_file
from roomier.cli.class_paths import check_class_path
from roomier.cli.plain_parser import PlainParser
from roomier.cli.trainer_verbs import current_folder_importable
from roomier.cli.workloads import batch_of
from roomier.core.errors import RoomierError
from roomier.core.tree import map_tensors
from roomier.core.units import format_bytes, parse_bytes
from roomier.core.untrusted import check_regular
from roomier.core.yaml_text import BoundedLoader
from roomier.storage.remote_path import RemotePath
from roomier.storage.sending import put

_SUFFIXES = {
    "safetensors": "-safetensors",
    "hugging-face": "-hugging-face",
    "lightning": ".ckpt",
    "torchscript": ".pt",
    "onnx": ".onnx",
    "torch-export": ".pt2",
}
_OF_A_MODEL = ("torchscript", "onnx", "torch-export")
_OF_WEIGHTS = ("safetensors", "hugging-face")
_INPUT_IN_PYTHON = ("input_sample", "sample", "example_inputs")  # arguments of the export functions that --input sets
_FORMATS_OF = {
    **dict.fromkeys(("max_shard_size", "dtype", "push_to_hub", "private"), _OF_WEIGHTS),
    "prefix": ("safetensors",),
    **dict.fromkeys(("processor", "adapters"), ("hugging-face",)),
    **dict.fromkeys(("model", "input"), _OF_A_MODEL),
    "method": ("torchscript",),
}


def run(verb: str, arguments: Sequence[str]) -> int:
    """Write the files and print their paths.

    Raises:
        RoomierError: an option is invalid, the checkpoint is damaged, or the output cannot be written.
    """
    options, others = _parser(verb).parse_known_intermixed_args(list(arguments))
    if options.out is not None and options.output is not None:
        problem, action = "cannot be combined with out", f"Remove it, or remove {str(options.out)!r}"
        raise RoomierError("--output", str(options.output), problem, action)
    # For a folder of checkpoints or runs, the newest checkpoint is exported.
    found = checkpoint.find_last(options.checkpoint) if options.checkpoint.is_dir() else None
    path = found or options.checkpoint
    output = options.out or options.output or _default_output(path, options.to)
    _check_options(options, others)
    if options.to in _OF_A_MODEL:
        with current_folder_importable():
            _export_model(options, others, path, output)
        return 0
    if is_lightning_file(path):
        action = "Load the file with Lightning, or resume with fit(ckpt_path=...) and export the checkpoint of that run"
        problem = f"is a Lightning file, but --to {options.to} requires a checkpoint folder"
        raise RoomierError("checkpoint", str(path), problem, action)
    with _uploaded(output) as local:
        _write_weights(options, path, output, local)
    return 0


def _check_options(options: argparse.Namespace, others: Sequence[str]) -> None:
    to = options.to
    for name, formats in _FORMATS_OF.items():
        value = getattr(options, name)
        if value is not None and to not in formats:
            option = f"--{name.replace('_', '-')}"
            problem = f"is not supported with --to {to}"
            raise RoomierError(option, value, problem, f"Remove it, or use --to {formats[0]}")
    if options.push_to_hub is not None:
        check_hub(options.push_to_hub)  # check before the export, which can take a long time
    elif options.private is not None:
        raise RoomierError("--private", True, "requires --push-to-hub", "Remove it, or pass --push-to-hub USER/NAME")
    if others and to not in _OF_A_MODEL:
        action = f"Remove it. Arguments of the model require --to {_OF_A_MODEL[0]}. See `roomier export --help`"
        raise RoomierError("export", others[0], f"is not supported with --to {to}", action)


def _default_output(path: Path, to: str) -> Path:
    # For a link such as "last", the output is written next to the link. The path "." has no name, so it is resolved.
    folder = path.parent if path.name else path.resolve().parent
    return folder / f"{path.resolve().name.removesuffix('.ckpt')}{_SUFFIXES[to]}"


def _export_model(options: argparse.Namespace, others: Sequence[str], path: Path, output: Path) -> None:
    model = model_to_export(path, options.model, others)
    inputs = example_inputs(options.input)
    try:
        with _uploaded(output) as local:
            _write_model(options, model, inputs, local)
            num_bytes = local.stat().st_size
    except RoomierError as error:
        if error.field not in _INPUT_IN_PYTHON:
            raise
        if inputs is None and getattr(model, "example_input_array", None) is None:
            action = "Pass --input, such as 'x=float32[8,3]', or set self.example_input_array in the model"
            raise RoomierError("--input", None, "is required to call forward", action) from error
        raise RoomierError("--input", options.input, error.problem, error.action) from error
    print(f"{path} -> {output}: {format_bytes(num_bytes)}")


@contextmanager
def _uploaded(output: Path) -> Iterator[Path]:
    """Yield ``output``. If it is an address, yield a temporary path, whose files are uploaded at the end.

    Raises:
        RoomierError: ``output`` is an address that exists.
        CheckpointError: the storage cannot be written.
    """
    if not isinstance(output, RemotePath):
        yield output
        return
    if output.exists():
        raise RoomierError("out", str(output), "already exists", "Choose another name")
    with tempfile.TemporaryDirectory(prefix="roomier-export-") as folder:
        local = Path(folder, output.name)
        yield local
        for file in [local] if local.is_file() else sorted(path for path in local.rglob("*") if path.is_file()):
            put(file, output / file.relative_to(local))


def _write_model(options: argparse.Namespace, model: nn.Module, inputs: Any, output: Path) -> None:
    if options.to == "onnx":
        export_onnx(model, output, inputs)
    elif options.to == "torch-export":
        export_torch(model, output, inputs)
    else:
        export_torchscript(model, output, method=options.method or "script", example_inputs=inputs)


def _write_weights(options: argparse.Namespace, path: Path, output: Path, local: Path) -> None:
    is_remote = isinstance(output, RemotePath)
    if options.to == "lightning":
        target = export_lightning(path, local)
        print(f"{path} -> {output if is_remote else target}: {format_bytes(target.stat().st_size)}")
        return
    given = options.max_shard_size
    num_bytes = DEFAULT_SHARD_BYTES if given is None else parse_bytes("--max-shard-size", given)
    if num_bytes <= 0:
        raise RoomierError("--max-shard-size", given, "must be positive", "Use a size such as 5GB or 500MiB")
    if options.to == "safetensors":
        done = export_safetensors(path, local, max_shard_bytes=num_bytes, dtype=options.dtype, prefix=options.prefix)
    else:
        done = export_hugging_face(
            path,
            local,
            max_shard_bytes=num_bytes,
            dtype=options.dtype,
            processor=options.processor,
            adapters=options.adapters or "merged",
        )
    print(
        f"{path} -> {output if is_remote else done.folder}: {format_bytes(done.num_bytes)} in {', '.join(done.files)}"
    )
    if options.push_to_hub is not None:
        print(f"{done.folder} -> {push_to_hub(done.folder, options.push_to_hub, private=options.private)}")


def _path(text: str) -> Path:
    try:
        return at_home(text)
    except RoomierError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser(verb: str) -> PlainParser:
    parser = PlainParser(
        prog=f"roomier {verb}",
        description="Export a checkpoint for other programs: its weights, a Lightning checkpoint, or the model itself.",
    )
    parser.add_argument(
        "checkpoint",
        type=_path,
        help="checkpoint, or folder of checkpoints or runs, of which the newest checkpoint is exported; or its address",
    )
    parser.add_argument(
        "out", type=_path, nargs="?", help="the file, folder or address to create; default: next to the checkpoint"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=list(_SUFFIXES),
        help="safetensors: weights with their names in the model; hugging-face: the files of save_pretrained, for "
        "from_pretrained; lightning: a .ckpt file to resume from; torchscript, onnx, torch-export: the model",
    )
    parser.add_argument("--output", type=_path, help="same as out")
    weights = parser.add_argument_group(
        "formats of the weights: safetensors, hugging-face (the export requires a few MiB of memory)"
    )
    weights.add_argument("--max-shard-size", help="maximum size of one file, such as 5GB (default) or 500MiB")
    weights.add_argument("--dtype", choices=sorted(DTYPES), help="dtype of all floating-point weights")
    weights.add_argument(
        "--prefix",
        help="safetensors: export only weights with this prefix, and remove it from their names; '' exports all "
        "weights",
    )
    weights.add_argument("--processor", type=_path, help="hugging-face: folder of a tokenizer or processor to include")
    weights.add_argument(
        "--adapters",
        choices=["merged", "alone"],
        help="hugging-face: merge the adapters into the weights (default), or write a folder for peft",
    )
    weights.add_argument(
        "--push-to-hub",
        metavar="REPO",
        help="also upload the folder to this repository on the Hugging Face Hub, such as user/model",
    )
    weights.add_argument(
        "--private", action="store_true", default=None, help="create the repository of --push-to-hub as private"
    )
    model = parser.add_argument_group("models: torchscript, onnx, torch-export")
    model.add_argument("--model", help="import path of the class; required")
    model.add_argument("--model.NAME", metavar="VALUE", help="arguments of the class; default: stored hyperparameters")
    model.add_argument("--input", help="arguments of forward, such as 'x=float32[8,3]', or a torch.save file")
    model.add_argument("--method", choices=["script", "trace"], help="torchscript: script (default) or trace")
    return parser


_ARGUMENT = "--model."
_HIGHEST_NUMBER = 2
"""Exclusive upper bound of the integers in generated inputs. The integers may be token ids or classes, and few models
have fewer tokens or classes."""


def model_to_export(path: Path, class_path: str | None, others: Sequence[str]) -> nn.Module:
    """Return the model of the checkpoint ``path``, with its weights.

    Args:
        class_path: import path of the model class.
        others: remaining command-line words, which set arguments of the model (``--model.NAME VALUE``).

    Raises:
        RoomierError: the class does not exist, or is not given.
    """
    if class_path is None:
        problem = "is required, because a checkpoint contains only the weights of the model"
        raise RoomierError("--model", None, problem, "Pass --model package.module.Class with the trained class")
    return plain_model(path, _class(class_path), _arguments(others))


def example_inputs(text: str | None) -> Any:
    """Return the inputs of ``forward``: the content of a ``torch.save`` file, or random values for given shapes.

    Args:
        text: path of a file, or a description such as ``"x=float32[8,3]; y=int64[8]"``; None returns None.

    Raises:
        RoomierError: ``text`` is neither a readable file nor a description.
    """
    if text is None:
        return None
    if Path(text).is_file():
        return _from_file(text)
    generator = torch.Generator().manual_seed(0)

    def with_values(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return torch.randint(0, _HIGHEST_NUMBER, tensor.shape, generator=generator).to(tensor.dtype)

    return map_tensors(with_values, batch_of(text))


def _class(class_path: str) -> type[nn.Module]:
    module, _, name = class_path.rpartition(".")
    if not module:
        raise RoomierError("--model", class_path, "must include the module of the class", "Use package.module.Class")
    check_class_path("--model", class_path)
    found = getattr(import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise RoomierError("--model", class_path, "must be a model class", "Pass a subclass of torch.nn.Module")
    return found


def _arguments(others: Sequence[str]) -> dict[str, Any]:
    words, found = list(others), dict[str, Any]()
    while words:
        name, is_joined, value = words.pop(0).partition("=")
        if not name.startswith(_ARGUMENT) or not (is_joined or words):
            action = "Use --model.NAME VALUE for arguments of the model. See `roomier export --help`"
            raise RoomierError("export", name, "is unknown or has no value", action)
        given = value if is_joined else words.pop(0)
        try:
            found[name.removeprefix(_ARGUMENT)] = yaml.load(given, Loader=BoundedLoader)
        except yaml.YAMLError as error:
            problem = f"is not YAML: {' '.join(str(error).split())}"
            raise RoomierError(name, given, problem, "Quote the value if it is text") from error
    return found


def _from_file(text: str) -> Any:
    try:
        check_regular(text)
        return torch.load(text, weights_only=True)
    except Exception as error:  # an invalid file can raise any error
        problem = f"cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        raise RoomierError("--input", text, problem, "Pass a torch.save file with a tensor, tuple or dict") from error
