"""scvi-tools: its training plan and its data splitter, unmodified."""

from pathlib import Path
from typing import Any

import pytest

from tests.third_party.side_by_side import SEPARATE, both, largest_difference

scvi = pytest.importorskip("scvi", reason=SEPARATE.format(name="scvi-tools"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_weights_and_all_metrics_equal_lightnings(tmp_path: Path) -> None:
    cells = scvi.data.synthetic_iid(batch_size=100, n_genes=40)

    def make() -> tuple[Any, dict[str, Any]]:
        scvi.settings.seed = 0
        scvi.model.SCVI.setup_anndata(own := cells.copy(), batch_key="batch")
        model = scvi.model.SCVI(own, n_latent=4, n_hidden=16)
        sizes = {"train_size": 0.8, "validation_size": 0.2, "batch_size": 32}
        data = scvi.dataloaders.DataSplitter(model.adata_manager, **sizes)
        return scvi.train.TrainingPlan(model.module, n_epochs_kl_warmup=3), {"datamodule": data}

    (peer, other), (trainer, own) = both(make, tmp_path, max_epochs=3, check_val_every_n_epoch=1)
    assert trainer.global_step == peer.global_step == 15
    assert largest_difference(own.state_dict(), other.state_dict()) <= 1e-6
    assert len(peer.callback_metrics) == 11
    expected = {name: float(value) for name, value in peer.callback_metrics.items()}
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(expected, rel=1e-5)
