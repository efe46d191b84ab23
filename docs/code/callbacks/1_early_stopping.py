from project import Classifier, Points

import roomier
from roomier.callbacks import EarlyStopping, ModelCheckpoint

roomier.seed_everything(0)
checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.3f}")
trainer = roomier.Trainer(
    max_epochs=50,
    callbacks=[checkpoint, EarlyStopping("val_loss", patience=2, min_delta=0.01)],
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), datamodule=Points())
print(checkpoint.best_model_path, checkpoint.best_model_score)
print(trainer.validate(ckpt_path="best", datamodule=Points()))
