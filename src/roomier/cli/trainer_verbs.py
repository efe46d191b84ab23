"""``roomier fit | validate | test | predict``: a Trainer, a model and data from the command line and YAML."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.cli.options import parse, text_of, trainer_parser
from roomier.cli.saved_config import SavedConfig
from roomier.core.log import notice
from roomier.core.rng import seed_everything
from roomier.trainer import Trainer


def run(verb: str, arguments: Sequence[str]) -> int:
    """Do what ``verb`` says. ``validate`` and ``test`` print their metrics, a JSON list with an object for each
    loader, on standard output.

    Raises:
        RoomierError: an option is wrong, or what it asks for cannot work.
        SystemExit: ``--help`` or ``--print_config`` was answered; or a signal ended the run.
    """
    with current_folder_importable():
        parser = trainer_parser(verb)
        config = parse(parser, arguments)
        if config.seed_everything is not None:
            seed_everything(config.seed_everything)
        chosen = parser.instantiate(config)
        trainer, model, data, ckpt_path = chosen.trainer, chosen.model, chosen.get("data"), chosen.ckpt_path
        if verb == "fit":
            trainer.callbacks.insert(0, SavedConfig(text_of(parser, config)))
            trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
        elif verb == "predict":
            _say_if_nobody_takes_the_predictions(trainer, model)
            trainer.predict(model, datamodule=data, ckpt_path=ckpt_path, return_predictions=False)
        else:
            evaluate: Any = {"validate": trainer.validate, "test": trainer.test}[verb]
            metrics = evaluate(model, datamodule=data, ckpt_path=ckpt_path)
            if trainer.is_global_zero:
                print(json.dumps(metrics))
    return 0


def _say_if_nobody_takes_the_predictions(trainer: Trainer, model: nn.Module) -> None:
    hook = "on_predict_batch_end"
    is_taken = isinstance(model, Module) and overrides(model, hook, Module)
    if not is_taken and not any(overrides(each, hook, Callback) for each in trainer.callbacks):
        notice(
            f"predictions are not kept: pass a callback whose {hook} writes the outputs it gets, as in "
            "--trainer.callbacks my_code.WritesPredictions"
        )


@contextlib.contextmanager
def current_folder_importable() -> Iterator[None]:
    """``python -m`` and a script have their folder on the path, an installed command does not."""
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
