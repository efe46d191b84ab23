from project import Classifier, Points

import roomier


class GradientCentralization(roomier.Callback):
    def on_gradient(self, trainer, pl_module, name, gradient):
        if gradient.dim() > 1:
            gradient -= gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True)


roomier.seed_everything(0)
trainer = roomier.Trainer(
    max_epochs=1,
    callbacks=[GradientCentralization()],
    gradient_clip_val=1.0,
    step_in_backward=True,
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), datamodule=Points())
