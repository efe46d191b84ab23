from project import Classifier, Points

import roomier

roomier.seed_everything(0)
trainer = roomier.Trainer(max_epochs=5, enable_plan_table=False, enable_model_summary=False)
trainer.fit(Classifier(), datamodule=Points(), ckpt_path="last")
