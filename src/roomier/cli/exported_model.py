"""Functions that create the model and the inputs of ``roomier export``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from roomier.checkpoint.export.plain import fill, plain_model
from roomier.cli.class_paths import check_class_path
from roomier.cli.saved_config import FILE_NAME
from roomier.cli.workloads import batch_of
from roomier.core.errors import RoomierError, shorten
from roomier.core.tree import map_tensors
from roomier.core.untrusted import MAX_YAML_BYTES, check_regular, read_text
from roomier.core.yaml_text import BoundedLoader

_ARGUMENT = "--model."
_HIGHEST_NUMBER = 2
"""Exclusive upper bound of the integers in generated inputs. The integers may be token ids or classes, and few models
have fewer tokens or classes."""


def model_to_export(
    path: Path, class_path: str | None, others: Sequence[str], *, trusts_folder: bool = False
) -> nn.Module:
    """Return the model of the checkpoint ``path``, with its weights.

    Args:
        class_path: import path of the model class; None uses the class that ``roomier fit`` wrote to the run folder.
        others: remaining command-line words, which set arguments of the model (``--model.NAME VALUE``).
        trusts_folder: if True, import the class that the run folder names, and construct it with the stored arguments.

    Raises:
        RoomierError: the class does not exist, is not given, or is named only in an untrusted run folder.
    """
    arguments = _arguments(others)
    if class_path is not None:
        return plain_model(path, _class(class_path), arguments)
    config = path.resolve().parent.parent / FILE_NAME
    named = _named_in(config) if config.is_file() else None
    action = "Pass --model package.module.Class with the trained class"
    if not named:
        problem = f"is required, because the run folder has no {FILE_NAME}, in which `roomier fit` stores the class"
        raise RoomierError("--model", None, problem, action)
    if not trusts_folder:
        problem = f"is required. {config} names {shorten(named['class_path'])}, whose import would execute code"
        raise RoomierError("--model", None, problem, f"{action}, or --trust-run-folder if you trust its author")
    model = _from_config(named, arguments)
    fill(model, path)
    return model.eval()


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


def _from_config(named: Mapping[str, Any], arguments: Mapping[str, Any]) -> nn.Module:
    from jsonargparse import ArgumentParser  # as in `roomier fit`, because arguments may be objects

    check_class_path("model", named["class_path"])
    named = {**named, "init_args": {**(named.get("init_args") or {}), **arguments}}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "model", fail_untyped=False, required=True)
    model: nn.Module = parser.instantiate(parser.parse_object({"model": named})).model
    return model


def _named_in(config: Path) -> dict[str, Any] | None:
    """Return the class and arguments of the model in ``config``, read as plain data; None if ``config`` contains no
    model."""
    try:
        found = yaml.load(read_text(config, MAX_YAML_BYTES), Loader=BoundedLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = f"cannot be read: {' '.join(str(error).split())[:200]}"
        action = "Pass --model package.module.Class with the trained class"
        raise RoomierError("config", str(config), problem, action) from error
    named = found.get("model") if isinstance(found, dict) else None
    named = {"class_path": named} if isinstance(named, str) else named
    return named if isinstance(named, dict) and isinstance(named.get("class_path"), str) else None


def _from_file(text: str) -> Any:
    try:
        check_regular(text)
        return torch.load(text, weights_only=True)
    except Exception as error:  # an invalid file can raise any error
        problem = f"cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        raise RoomierError("--input", text, problem, "Pass a torch.save file with a tensor, tuple or dict") from error
