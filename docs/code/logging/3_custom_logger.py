import json
from pathlib import Path

from project import Classifier, Points

import roomier


class Best(roomier.Logger):
    name = "best"

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        self.path = run_dir / "best.json"
        self.best = json.loads(self.path.read_text()) if resumed_step is not None and self.path.exists() else {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.best = {**self.best, **{name: min(value, self.best.get(name, value)) for name, value in metrics.items()}}

    def finalize(self, status: str) -> None:
        self.path.write_text(json.dumps(self.best))


roomier.seed_everything(0)
trainer = roomier.Trainer(
    max_epochs=2,
    logger=[Best(), roomier.loggers.CSVLogger("runs")],
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), datamodule=Points())
print(Path("runs/version_1/best.json").read_text())
