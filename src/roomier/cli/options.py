"""Options of ``fit``, ``validate``, ``test`` and ``predict``, created from the signatures of the classes."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentError
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from roomier import callbacks
from roomier.api.datamodule import DataModule
from roomier.api.overrides import LightningDataModule
from roomier.cli.class_paths import remove_unknown_classes
from roomier.cli.config_files import check_texts, naming_file, options_in, remove
from roomier.cli.explain import explain
from roomier.cli.help_screen import first_screen, requested_topic, topic_text
from roomier.core.errors import CombinedError, RoomierError, combined
from roomier.core.yaml_text import check_aliases
from roomier.trainer import Trainer
from roomier.trainer.keywords.arguments import HARMLESS_KEYWORDS

_DESCRIPTIONS = {
    "fit": "Train a model.",
    "validate": "Evaluate a model on its validation data and print the metrics as JSON.",
    "test": "Evaluate a model on its test data and print the metrics as JSON.",
    "predict": "Run predict_step on the prediction data. Callbacks receive the outputs in on_predict_batch_end.",
}

_YAML = "roomier-yaml"


def _load(text: str) -> Any:
    """Load YAML like jsonargparse, within the limit of :mod:`roomier.core.yaml_text`."""
    check_aliases(text)
    return get_loader("yaml")(text)


class VerbParser(ArgumentParser):
    """Parser that imports roomier's callbacks, so options can name them by class name."""

    def __init__(self, **options: Any) -> None:
        set_loader(_YAML, _load, (yaml.YAMLError,))
        super().__init__(**{"parser_mode": _YAML, **options})
        for name in callbacks.__all__:
            getattr(callbacks, name)

    def format_help(self, *arguments: Any, **options: Any) -> str:
        return first_screen(self)


def trainer_parser(verb: str) -> ArgumentParser:
    """Return the parser of ``verb``, with options for the arguments of the Trainer, the model class and the data
    class."""
    parser = VerbParser(
        prog=f"roomier {verb}", description=_DESCRIPTIONS[verb], exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML file with options; later options on the command line take precedence"
    )
    parser.add_argument(
        "--seed_everything",
        type=bool | int | None,
        default=None,
        help="seed for Python, NumPy and torch; true means the value of PL_GLOBAL_SEED, or 0",
    )
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False)
    parser.add_subclass_arguments(
        nn.Module,
        "model",
        fail_untyped=False,
        required=True,
        help="import path of a roomier.Module, a LightningModule, or any nn.Module with a loss",
    )
    parser.add_argument(
        "--ckpt_path", type=str | None, default=None, help="a checkpoint folder, or 'last' for the newest checkpoint"
    )
    add_data_and_options_of_lightning(
        parser, "import path of a DataModule of roomier or Lightning; default: the loaders of the model"
    )
    return parser


def add_data_and_options_of_lightning(parser: ArgumentParser, use: str) -> None:
    """Add the option ``--data``, and the options of ``LightningCLI`` that roomier's Trainer does not have, so that the
    YAML that LightningCLI prints can be used. The help does not list the hidden options."""
    parser.add_subclass_arguments(
        (DataModule, LightningDataModule), "data", fail_untyped=False, required=False, help=use
    )
    of_optimizer = "class of an optimizer, such as AdamW, which replaces the optimizer of the model"
    for kind, name, first, about in (
        (Optimizer, "optimizer", "params", of_optimizer),
        (LRScheduler, "lr_scheduler", "optimizer", "class of a scheduler for --optimizer, such as StepLR"),
    ):
        parser.add_subclass_arguments(
            kind, name, required=False, skip={first}, instantiate=False, fail_untyped=False, help=about
        )
    for name in ("weights_only", "verbose", "return_predictions"):
        parser.add_argument(f"--{name}", type=bool | None, default=SUPPRESS, help=SUPPRESS)
    for name in HARMLESS_KEYWORDS:
        parser.add_argument(f"--trainer.{name}", type=Any, default=SUPPRESS, help=SUPPRESS)


def text_of(parser: ArgumentParser, config: Namespace) -> str:
    """Return YAML that starts the same run: all options with their values, except ``ckpt_path``."""
    kept = config.clone()
    kept.ckpt_path = None
    text: str = parser.dump(kept, skip_unset=False)
    return text


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Return the values of all options.

    Raises:
        RoomierError: options are invalid. All errors are reported together.
        SystemExit: after ``--help`` or ``--print_config``.
        Exception: raised by an imported module.
    """
    topic = requested_topic(arguments)
    if topic is not None:
        print(topic_text(parser, topic) if topic else first_screen(parser))
        raise SystemExit(0)
    options = options_in(arguments)
    check_texts(options)
    errors = remove_unknown_classes(options)
    missing = {error.field.partition(".")[0] for error in errors}
    config = None
    while config is None:
        try:
            config = parser.parse_args([word for option in options for word in option.words])
        except ArgumentError as error:
            found = naming_file(explain(str(error), parser), options)
            is_removed = remove(options, found)
            field = found.field.removeprefix("--")
            if found.problem != "is required" or field not in missing:  # a removed option is also missing
                errors.append(found)
            missing.add(field)
            if not is_removed:
                break
    if not errors:
        assert config is not None
        return config
    if config is not None:
        errors += _errors_of_trainer(config)
    raise combined(list({str(error): error for error in errors}.values()), "The command")


def _errors_of_trainer(config: Namespace) -> list[RoomierError]:
    """Return the errors that the Trainer raises for its keywords. Callbacks and loggers are not created."""
    objects = ("callbacks", "logger", "profiler")
    keywords = {name: value for name, value in config.trainer.as_dict().items() if name not in objects}
    errors: list[RoomierError] = []
    while True:
        try:
            Trainer(**keywords)
        except RoomierError as error:
            found = error.errors if isinstance(error, CombinedError) else (error,)
            errors += found
            invalid = keywords.keys() & {each.field.partition(".")[0] for each in found}
            keywords = {name: value for name, value in keywords.items() if name not in invalid}
            if invalid:
                continue
        return errors
