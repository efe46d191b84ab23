"""GluonTS: an estimator that creates its Trainer and reads its best checkpoint with ``load_from_checkpoint``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roomier import Trainer
from tests.third_party.side_by_side import SEPARATE, largest_difference, pl

pytest.importorskip("gluonts", reason=SEPARATE.format(name="gluonts[torch]"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_weights_and_forecasts_equal_lightnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model import estimator
    from gluonts.torch.model.simple_feedforward import SimpleFeedForwardEstimator

    library = estimator.pl
    monkeypatch.setattr(library.callbacks.ModelCheckpoint, "format", "lightning", raising=False)
    waves = [np.sin(np.arange(80) / 5 + phase).astype(np.float32) for phase in range(4)]
    data = ListDataset([{"start": "2020-01-01", "target": wave} for wave in waves], freq="D")
    sizes: dict[str, Any] = {"prediction_length": 6, "context_length": 12, "hidden_dimensions": [16], "batch_size": 8}
    results = []
    for kind in (library.Trainer, Trainer):
        monkeypatch.setattr(library, "Trainer", kind)
        pl.seed_everything(0, verbose=False)
        given = {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": tmp_path / kind.__module__, "logger": False}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        trained = SimpleFeedForwardEstimator(**sizes, num_batches_per_epoch=5, trainer_kwargs={**given, **quiet})
        predictor = trained.train(data)
        torch.manual_seed(3)
        results.append((predictor.prediction_net.state_dict(), next(iter(predictor.predict(data))).mean))
    assert largest_difference(results[0][0], results[1][0]) <= 1e-6
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
