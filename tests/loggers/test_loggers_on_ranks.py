"""With several ranks, only the first rank writes, and calls on other ranks have no effect."""

import json
from pathlib import Path
from typing import Any

import torch

import roomier
from tests.loggers.conftest import Line
from tests.loggers.test_tensorboard_logger import points


class LogsDirectly(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_scalar("own", float(self.global_rank), batch_idx)
        for logger in self.loggers:
            logger.log_metrics({"rank": torch.tensor(float(self.global_rank))}, step=batch_idx)
            assert logger.log_dir == str(self.trainer.log_dir)
        return super().training_step(batch, batch_idx)


def fit_and_log(folder: Path) -> str:
    trainer = roomier.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        log_every_n_steps=1,
        default_root_dir=folder,
        logger=["tensorboard", "jsonl"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LogsDirectly(), [[torch.ones(4, 4)]] * 8)
    return str(trainer.log_dir)


def test_only_the_first_rank_writes(on_ranks, tmp_path: Path) -> None:
    folders = on_ranks(2, fit_and_log, tmp_path)
    assert len(set(folders)) == 1
    rows = [json.loads(line) for line in (Path(folders[0]) / "metrics.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows if "rank" in row] == [0.0, 0.0]
    assert points(Path(folders[0]), "own") == [(0, 0.0), (1, 0.0)]
    assert len(list(Path(folders[0]).glob("events.*"))) == 1
