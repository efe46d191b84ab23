from project import Classifier, Points

import roomier

roomier.seed_everything(0)
trainer = roomier.Trainer(
    devices=2,
    strategy="zero2",
    max_epochs=3,
    enable_plan_table=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), datamodule=Points())
