"""Options of ``fit``, ``validate``, ``test`` and ``predict``, created from the signatures of the classes."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from torch import nn

from roomier import callbacks
from roomier.api.datamodule import DataModule
from roomier.api.lightning_types import LightningDataModule
from roomier.cli.class_paths import check_class_paths
from roomier.cli.config_files import check_texts, naming_file
from roomier.cli.explain import explain
from roomier.core.yaml_text import check_aliases
from roomier.trainer import Trainer

_DESCRIPTIONS = {
    "fit": "Train a model.",
    "validate": "Evaluate a model on its validation data and print the metrics as JSON.",
    "test": "Evaluate a model on its test data and print the metrics as JSON.",
    "predict": "Run predict_step on the prediction data. Callbacks receive the outputs in on_predict_batch_end.",
}

_YAML = "roomier-yaml"
_CLASSES_OF_TORCH = re.compile(r",\s+known\s+subclasses:[^()]*\)")


def _load(text: str) -> Any:
    """Load YAML like jsonargparse, within the limit of :mod:`roomier.core.yaml_text`."""
    check_aliases(text)
    return get_loader("yaml")(text)


class VerbParser(ArgumentParser):
    """Parser that imports roomier's callbacks, so options can name them by class name.

    The help of the parser omits the list of known classes, because the list for a model contains hundreds of torch
    classes.
    """

    def __init__(self, **options: Any) -> None:
        set_loader(_YAML, _load, (yaml.YAMLError,))
        super().__init__(**{"parser_mode": _YAML, **options})
        for name in callbacks.__all__:
            getattr(callbacks, name)

    def format_help(self, *arguments: Any, **options: Any) -> str:
        return _CLASSES_OF_TORCH.sub(")", super().format_help(*arguments, **options))


def trainer_parser(verb: str) -> ArgumentParser:
    """Return the parser of ``verb``, with options for the arguments of the Trainer, the model class and the data
    class."""
    parser = VerbParser(
        prog=f"roomier {verb}", description=_DESCRIPTIONS[verb], exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML file with options; later options on the command line take precedence"
    )
    parser.add_argument("--seed_everything", type=int | None, default=None, help="seed for Python, NumPy and torch")
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False)
    parser.add_subclass_arguments(
        nn.Module,
        "model",
        fail_untyped=False,
        required=True,
        help="import path of a roomier.Module, a LightningModule, or any nn.Module with a loss",
    )
    parser.add_subclass_arguments(
        (DataModule, LightningDataModule),
        "data",
        fail_untyped=False,
        required=False,
        help="import path of a DataModule of roomier or Lightning; default: the loaders of the model",
    )
    parser.add_argument(
        "--ckpt_path", type=str | None, default=None, help="a checkpoint folder, or 'last' for the newest checkpoint"
    )
    return parser


def text_of(parser: ArgumentParser, config: Namespace) -> str:
    """Return YAML that starts the same run: all options with their values, except ``ckpt_path``."""
    kept = config.clone()
    kept.ckpt_path = None
    text: str = parser.dump(kept, skip_unset=False)
    return text


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Return the values of all options.

    Raises:
        RoomierError: an option is invalid.
        SystemExit: after ``--help`` or ``--print_config``.
        Exception: raised by an imported module.
    """
    check_texts(arguments)
    check_class_paths(arguments)
    try:
        return parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise naming_file(explain(str(error), parser), arguments) from error
