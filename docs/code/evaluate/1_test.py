from project import Classifier, Points

import roomier


class Tested(Classifier):
    def test_step(self, batch, batch_idx):
        x, label = batch
        self.log("test_accuracy", (self.net(x).argmax(dim=1) == label).float().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(dim=1)


class PointsToTest(Points):
    def test_dataloader(self):
        return self.val_dataloader()

    predict_dataloader = test_dataloader


roomier.seed_everything(0)
trainer = roomier.Trainer(max_epochs=3, enable_plan_table=False, enable_model_summary=False, enable_progress_bar=False)
trainer.fit(Tested(), datamodule=PointsToTest())
(metrics,) = trainer.test()  # the best checkpoint of the fit; one dict per loader
predictions = trainer.predict()  # one item per batch
print([len(each) for each in predictions])
