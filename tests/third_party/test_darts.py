"""darts: a forecasting model that receives a Trainer, unmodified."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roomier import Trainer
from tests.third_party.side_by_side import SEPARATE, largest_difference, quiet_trainer

darts = pytest.importorskip("darts", reason=SEPARATE.format(name="darts"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_weights_and_forecasts_equal_lightnings(tmp_path: Path) -> None:
    import pytorch_lightning
    from darts.models import NBEATSModel

    series = darts.TimeSeries.from_values(np.sin(np.arange(120) / 6).astype(np.float32))
    sizes: dict[str, Any] = {"num_stacks": 2, "num_blocks": 1, "num_layers": 2, "layer_widths": 16, "batch_size": 16}
    results = []
    for kind in (pytorch_lightning.Trainer, Trainer):
        model = NBEATSModel(input_chunk_length=12, output_chunk_length=4, n_epochs=2, random_state=0, **sizes)
        model.fit(series[:-40], val_series=series[-40:], trainer=quiet_trainer(kind, tmp_path, max_epochs=2))
        forecast = model.predict(6, trainer=quiet_trainer(kind, tmp_path)).values()
        results.append((model.model.state_dict(), forecast))
    assert largest_difference(results[0][0], results[1][0]) <= 1e-6
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
