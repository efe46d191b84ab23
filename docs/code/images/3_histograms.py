import json
from pathlib import Path

from digits import Bars, Classifier

import roomier
from roomier.callbacks import HistogramMonitor

roomier.seed_everything(0)
trainer = roomier.Trainer(
    max_epochs=2,
    callbacks=[HistogramMonitor(every_n_steps=30, bins=4, include="net.1.*")],
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), datamodule=Bars())
for line in Path("runs/version_1/histograms.jsonl").read_text().splitlines():
    row = json.loads(line)
    print(row["step"], row["name"], sum(row["counts"]), "values in", len(row["counts"]), "bins")
