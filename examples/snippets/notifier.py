"""Add custom behavior with a callback, which defines only the hooks that it needs."""

from autoencoder import LitAutoEncoder, loader

from roomier import Callback, Trainer

messages = []  # placeholder for the API of a chat service


class MyNotifier(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        messages.append(f"epoch {trainer.current_epoch} of {type(pl_module).__name__} started!")


Trainer(max_epochs=2, callbacks=[MyNotifier()]).fit(LitAutoEncoder(), loader())
print("\n".join(messages))
assert messages == [f"epoch {epoch} of LitAutoEncoder started!" for epoch in range(2)]
