from digits import Bars, Classifier

import roomier


class ShowsSamples(Classifier):
    def validation_step(self, batch, batch_idx):
        x, label = batch
        predicted = self.net(x).argmax(dim=1)
        self.log("val_acc", (predicted == label).float().mean())
        if batch_idx == 0:
            self.log_image("samples", x[:3], caption=[f"predicted {i}" for i in predicted[:3].tolist()])


roomier.seed_everything(0)
trainer = roomier.Trainer(max_epochs=2, enable_plan_table=False, enable_model_summary=False, enable_progress_bar=False)
trainer.fit(ShowsSamples(), datamodule=Bars())
