"""With several ranks, only the first rank prints, and sizes refer to the unsharded model."""

from pathlib import Path

import torch
from torch import nn

import roomier
from roomier.callbacks import ModelSummary
from roomier.callbacks.model_summary import Summary, summarize


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        loss = self.head(batch).mean()
        self.log("shown", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", self.head(batch).mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Summarizes(ModelSummary):
    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        self.summary = summarize(pl_module)


def fit(root: Path) -> Summary:
    summary = Summarizes()
    trainer = roomier.Trainer(
        accelerator="cpu",
        strategy="zero3",
        devices=2,
        max_epochs=1,
        log_every_n_steps=1,
        default_root_dir=root,
        callbacks=[summary],
        enable_model_summary=False,  # Summarizes replaces it
    )
    trainer.fit(Net(), [torch.ones(2, 5)] * 4, [torch.ones(2, 5)] * 3)
    return summary.summary


def test_one_rank_prints_and_writes(on_ranks, tmp_path: Path, capsys) -> None:
    summaries = on_ranks(2, fit, tmp_path)
    assert summaries == [summarize(Net())] * 2
    lines = capsys.readouterr().out.splitlines()
    printed = [line for line in lines if "Gloo" not in line]
    assert {line.split("]")[0] for line in printed} == {"[rank 0"}
    for once in ("ModuleList", "frozen", "sanity check | batch 2/2", "validation | batch 3/3", "step 2/2"):
        assert sum(once in line for line in printed) == 1, once
    [folder] = tmp_path.iterdir()
    assert {"metrics.csv", "metrics.jsonl", "plan.yaml", "checkpoints"} <= {path.name for path in folder.iterdir()}
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3  # two steps and an evaluation
