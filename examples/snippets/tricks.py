"""Combine several options, each of which is one keyword of the Trainer."""

from autoencoder import LitAutoEncoder, loader

from roomier import Trainer

model = LitAutoEncoder(learning_rate=1e-4)
trainer = Trainer(
    max_epochs=10,
    auto_lr_find=True,
    gradient_clip_val=1.0,
    accumulate_grad_batches=10,
    max_steps=20,
)
trainer.fit(model, loader(num_samples=800))
print(f"{trainer.global_step} steps with the learning rate {model.hparams.learning_rate:.2g} from auto_lr_find")
assert trainer.global_step == 20
assert model.hparams.learning_rate != 1e-4
