"""Stop when the validation loss no longer decreases, and keep the best checkpoint."""

from autoencoder import LitAutoEncoder, loader

from roomier import Trainer
from roomier.callbacks import EarlyStopping, ModelCheckpoint

checkpoint = ModelCheckpoint(monitor="val_loss")
trainer = Trainer(max_epochs=20, callbacks=[EarlyStopping(monitor="val_loss", patience=2, min_delta=0.05), checkpoint])
trainer.fit(LitAutoEncoder(), loader(shuffle=True), loader(64))

best = LitAutoEncoder.load_from_checkpoint(checkpoint.best_model_path)
print(f"stopped after {trainer.current_epoch} epochs; best val_loss {checkpoint.best_model_score:.3f}")
assert trainer.current_epoch < 20
assert trainer.validate(best, loader(64))[0]["val_loss"] == checkpoint.best_model_score
