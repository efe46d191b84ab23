"""chemprop's message-passing network for molecules, an unmodified third-party LightningModule."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roomier import Trainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from chemprop import data, featurizers, models, nn

ENDS = ("O", "N", "F", "Cl", "C=O", "C(=O)O", "c1ccccc1", "S")
SMILES = ["C" * length + end for length in range(1, 9) for end in ENDS]

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]


def weight_like(smiles: str) -> list[float]:
    """Return a value that a network can learn from the atoms."""
    return [smiles.count("C") + 0.5 * smiles.count("O") + 2.0 * smiles.count("c")]


@pytest.fixture(scope="module")
def molecules() -> Any:
    points = [data.MoleculeDatapoint.from_smi(smiles, weight_like(smiles)) for smiles in SMILES]
    dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    return dataset, dataset.normalize_targets()


def network(scaler: Any) -> models.MPNN:
    torch.manual_seed(0)
    return models.MPNN(
        nn.BondMessagePassing(d_h=32, depth=2),
        nn.MeanAggregation(),
        nn.RegressionFFN(
            input_dim=32, hidden_dim=32, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)
        ),
        batch_norm=True,
        metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
        init_lr=1e-3,
        max_lr=1e-2,
    )


def test_it_learns_and_its_numbers_are_lightnings(molecules: Any, make_trainer: Callable[..., Trainer]) -> None:
    dataset, scaler = molecules
    loader = data.build_dataloader(dataset, batch_size=16, num_workers=0, shuffle=False)
    trainer = make_trainer(max_epochs=10)
    module = network(scaler)
    [before] = trainer.validate(module, loader)
    trainer.fit(module, loader, loader)
    [after] = trainer.validate(module, loader)
    assert after["val_loss"] < 0.7 * before["val_loss"]

    peer = pl.Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    theirs = network(scaler)
    peer.fit(theirs, loader, loader)
    for name in ("train_loss", "val_loss", "val/rmse", "val/mae"):
        assert trainer.callback_metrics.keys() <= peer.callback_metrics.keys() | {"loss"}
        assert after.get(name, peer.callback_metrics[name]) == pytest.approx(
            float(peer.callback_metrics[name]), rel=1e-5
        )
    for own, other in zip(module.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
