from project import Classifier, Points
from torch.nn import functional as F

import roomier


class ByHand(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, label = batch
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), label))
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()


roomier.seed_everything(0)
trainer = roomier.Trainer(max_epochs=3, enable_plan_table=False, enable_model_summary=False, enable_progress_bar=False)
trainer.fit(ByHand(), datamodule=Points())
