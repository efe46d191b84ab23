"""Names that Windows lacks are not needed to import roomier and to train on one process."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, psutil, torch
sys.modules["resource"] = None  # after psutil, which needs it on Linux
del signal.SIGUSR1, os.register_at_fork
import roomier
from roomier.plan.migrate import lightning_strategies
class Net(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = roomier.Trainer(max_steps=2, accelerator="cpu")
trainer.fit(Net(), [torch.ones(1, 1)] * 2)
assert trainer.global_step == 2
"""


@pytest.mark.more
def test_training_without_the_signals_and_modules_that_windows_lacks(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, check=True)
