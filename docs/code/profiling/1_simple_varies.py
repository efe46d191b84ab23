from project import Classifier, Points

import roomier

roomier.seed_everything(0)
trainer = roomier.Trainer(
    max_epochs=4,
    profiler="simple",
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), datamodule=Points())
