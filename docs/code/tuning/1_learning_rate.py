from project import Classifier, Points

import roomier

roomier.seed_everything(0)
trainer = roomier.Trainer(
    auto_lr_find=True,
    max_epochs=5,
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
model = Classifier(learning_rate=1e-5)
trainer.fit(model, datamodule=Points(batch_size=10))
print(model.hparams.learning_rate)
