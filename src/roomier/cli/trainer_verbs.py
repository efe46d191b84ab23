"""``roomier fit | validate | test | predict``: run a Trainer with a model and data from the command line and YAML."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.cli.optimizer_option import with_optimizer
from roomier.cli.options import parse, text_of, trainer_parser
from roomier.core.device.rng import seed_everything
from roomier.core.log import notice
from roomier.core.replacing import replacing
from roomier.core.untrusted import read_text
from roomier.trainer import Trainer


def run(verb: str, arguments: Sequence[str]) -> int:
    """Run ``verb``. ``validate`` and ``test`` print their metrics as a JSON list with one object per loader.

    Raises:
        RoomierError: an option is invalid, or the request is not supported.
        SystemExit: ``--help`` or ``--print_config`` was passed, or a signal terminated the run.
    """
    with current_folder_importable():
        parser = trainer_parser(verb)
        config = parse(parser, arguments)
        seed = config.seed_everything
        if seed is not None and seed is not False:
            config.seed_everything = seed_everything(None if seed is True else seed)
        chosen = parser.instantiate(config)
        trainer, model = chosen.trainer, with_optimizer(config, chosen.model)
        call = {name: chosen.get(name) for name in ("ckpt_path", "weights_only")} | {"datamodule": chosen.get("data")}
        if verb == "fit":
            trainer.callbacks.insert(0, SavedConfig(text_of(parser, config)))
            trainer.fit(model, **call)
        elif verb == "predict":
            _warn_about_unused_predictions(trainer, model)
            trainer.predict(model, **call, return_predictions=False)
        else:
            evaluate: Any = {"validate": trainer.validate, "test": trainer.test}[verb]
            metrics = evaluate(model, **call, verbose=chosen.get("verbose") is not False)
            if trainer.is_global_zero:
                print(json.dumps(metrics))
    return 0


def _warn_about_unused_predictions(trainer: Trainer, model: nn.Module) -> None:
    hook = "on_predict_batch_end"
    is_used = isinstance(model, Module) and overrides(model, hook, Module)
    if not is_used and not any(overrides(each, hook, Callback) for each in trainer.callbacks):
        notice(
            f"predictions are not stored. Pass a callback whose {hook} writes the predictions, such as "
            "--trainer.callbacks my_code.WritesPredictions"
        )


@contextlib.contextmanager
def current_folder_importable() -> Iterator[None]:
    """Add the current folder to ``sys.path``, as Python does for ``python -m``."""
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


FILE_NAME = "config.yaml"


class SavedConfig(Callback):
    """Callback that writes ``config.yaml`` to the run folder. ``roomier fit --config`` repeats the run with this file.

    A resumed run uses the same folder. If the settings of the resumed run differ, they are written to
    ``config-step=N.yaml`` instead.

    Args:
        text: content of the file.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.keeps_files or not trainer.is_global_zero:
            return
        path = Path(trainer.log_dir) / FILE_NAME
        if path.exists() and read_text(path) != self._text:
            path = path.with_stem(f"config-step={trainer.global_step}")
        with replacing(path) as file:
            file.write(self._text)
