"""Streams of litdata shard themselves, so each rank reads its shard and no sample is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.third_party.side_by_side import SEPARATE

pytest.importorskip("litdata", reason=SEPARATE.format(name="litdata"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SCRIPT = """
import json, sys
import litdata, torch, roomier

def sample(number):
    return torch.tensor([number])

class Net(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def train_dataloader(self):
        stream = litdata.StreamingDataset("data", drop_last=False)
        loader = litdata.StreamingDataLoader if sys.argv[1] == "own" else torch.utils.data.DataLoader
        return loader(stream, batch_size=2)

    def training_step(self, batch, batch_idx):
        self.seen += batch.flatten().tolist()
        return self.layer(batch.float() * 1e-3).mean()

    def on_train_end(self):
        with open(f"seen-{self.trainer.global_rank}.json", "w") as file:
            json.dump(self.seen, file)

if __name__ == "__main__":
    if sys.argv[1] == "write":
        litdata.optimize(fn=sample, inputs=list(range(64)), output_dir="data", chunk_size=8, num_workers=1)
    else:
        settings = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False}
        roomier.Trainer(strategy="ddp", **settings).fit(Net())
"""


@pytest.mark.parametrize("loader", ["own", "torch"])
def test_every_sample_is_read_once(tmp_path: Path, loader: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for argument in ("write", loader):
        subprocess.run([sys.executable, "script.py", argument], cwd=tmp_path, check=True, timeout=300)
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    assert sorted(seen[0] + seen[1]) == list(range(64))
    assert len(seen[0]) == 32
