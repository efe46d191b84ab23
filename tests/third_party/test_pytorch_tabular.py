"""pytorch_tabular: a model that creates its Trainer from the names in the signature of ``pl.Trainer``."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roomier
from tests.third_party.side_by_side import SEPARATE, largest_difference

pytest.importorskip("pytorch_tabular", reason=SEPARATE.format(name="pytorch_tabular"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def trained(kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, model_config: Any, task: str) -> Any:
    import pandas as pd
    import pytorch_lightning as pl
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

    monkeypatch.setattr(pl, "Trainer", kind)
    monkeypatch.setattr(pl.callbacks.ModelCheckpoint, "format", "lightning", raising=False)
    generator = np.random.default_rng(0)
    table = pd.DataFrame({name: generator.normal(size=240) for name in "abc"})
    table["kind"] = generator.choice(["u", "v", "w"], size=240)
    table["y"] = table["a"] * 2 - table["b"] if task == "regression" else (table["a"] > 0).astype(int)
    trainer_config = TrainerConfig(
        batch_size=32,
        max_epochs=3,
        accelerator="cpu",
        checkpoints_path=str(folder / kind.__module__),
        progress_bar="none",
        trainer_kwargs={"enable_model_summary": False, "default_root_dir": str(folder / kind.__module__)},
    )
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=[*"abc"], categorical_cols=["kind"]),
        model_config=model_config(task=task),
        optimizer_config=OptimizerConfig(optimizer="AdamW", optimizer_params={"weight_decay": 0.01}),
        trainer_config=trainer_config,
        verbose=False,
    )
    model.fit(train=table[:180], validation=table[180:])
    return model, model.predict(table[180:])


def of_lightning(kind: Any, signature: inspect.Signature) -> Any:
    """Return a subclass of ``kind`` whose signature contains Lightning's names only."""

    class WithLightningsSignature(kind):
        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)

    vars(WithLightningsSignature)["__init__"].__signature__ = signature
    return WithLightningsSignature


@pytest.mark.parametrize("name", ["CategoryEmbeddingModelConfig", "FTTransformerConfig"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_weights_and_predictions_equal_lightnings(
    name: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pytorch_lightning as pl
    from pytorch_tabular import models

    monkeypatch.chdir(tmp_path)
    library = pl.Trainer
    own = of_lightning(roomier.Trainer, inspect.signature(library.__init__))
    results = [trained(kind, tmp_path, monkeypatch, getattr(models, name), task) for kind in (library, own)]
    (theirs, their_predictions), (ours, our_predictions) = results
    difference = largest_difference(theirs.model.state_dict(), ours.model.state_dict())
    print(f"{name}, {task}: weights differ by {difference:.1e}")
    assert difference <= 1e-6
    columns = their_predictions.select_dtypes("number").columns
    np.testing.assert_allclose(our_predictions[columns], their_predictions[columns], rtol=1e-5, atol=1e-6)
