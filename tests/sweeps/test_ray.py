"""Sweeps with Ray Tune: reports, checkpoints, and a scheduler that ends trials."""

import runpy
from pathlib import Path

import pytest
import torch

import roomier

pytestmark = pytest.mark.services
ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'roomier[sweeps]')")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_sweep.py"


@pytest.mark.filterwarnings("ignore")  # Ray's own warnings
def test_asha_ends_trials_and_checkpoints_are_reported(tmp_path: Path) -> None:
    try:
        results = list(runpy.run_path(str(EXAMPLE))["main"](tmp_path))
    finally:
        ray.shutdown()
    assert [result.error for result in results] == [None] * 4
    reports = {result.config["lr"]: result.metrics["training_iteration"] for result in results}
    assert reports[0.3] == 8
    assert max(reports[0.0003], reports[0.0001]) < 8
    best = min(results, key=lambda result: result.metrics["val_loss"])
    assert best.config["lr"] == 0.3
    with best.checkpoint.as_directory() as folder:
        assert any(Path(folder).iterdir())
        restored = restored_step(Path(folder))
    assert restored == 64


def restored_step(folder: Path) -> int:
    """Return the last step of a run that resumes from ``folder`` after its last epoch."""
    module = runpy.run_path(str(EXAMPLE))["Line"](0.1)
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64)[:, None])
    loaders = [torch.utils.data.DataLoader(data, size) for size in (8, 64)]
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = roomier.Trainer(accelerator="cpu", max_epochs=8, **settings)
    trainer.fit(module, *loaders, ckpt_path=folder)
    return trainer.global_step
