"""neuralforecast: models that create a Trainer for training and for each forecast."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roomier import Trainer
from tests.third_party.side_by_side import SEPARATE, largest_difference

pytest.importorskip("neuralforecast", reason=SEPARATE.format(name="neuralforecast"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", ["NHITS", "LSTM", "TFT"])
def test_weights_and_forecasts_equal_lightnings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import neuralforecast.models
    import pandas as pd
    import pytorch_lightning as pl
    from neuralforecast import NeuralForecast

    monkeypatch.chdir(tmp_path)
    days = pd.date_range("2020-01-01", periods=90, freq="D")
    series = [
        pd.DataFrame({"unique_id": str(number), "ds": days, "y": np.sin(np.arange(90) / 5 + number).astype(np.float32)})
        for number in range(3)
    ]
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    results = []
    for kind in (pl.Trainer, Trainer):
        monkeypatch.setattr(pl, "Trainer", kind)
        model = getattr(neuralforecast.models, name)(
            h=6, input_size=18, max_steps=12, val_check_steps=4, random_seed=3, accelerator="cpu", **quiet
        )
        forecaster = NeuralForecast(models=[model], freq="D")
        forecaster.fit(pd.concat(series), val_size=6)
        results.append((forecaster.models[0].state_dict(), forecaster.predict()[name].to_numpy()))
    difference = largest_difference(results[0][0], results[1][0])
    print(f"{name}: weights differ by {difference:.1e}")
    assert difference <= 1e-6
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
