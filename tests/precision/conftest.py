"""A Trainer that writes and prints nothing unless it is asked to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roomier import Trainer


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(**keywords: Any) -> Trainer:
        quiet = {
            "default_root_dir": tmp_path,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**{**quiet, **keywords})

    return make
