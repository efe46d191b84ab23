import os
import signal

from project import Classifier, Points

import roomier


class Interrupt(roomier.Callback):
    """Stands in for the job scheduler, which sends SIGTERM before it ends the job."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 40:
            os.kill(os.getpid(), signal.SIGTERM)


roomier.seed_everything(0)
trainer = roomier.Trainer(max_epochs=5, callbacks=[Interrupt()], enable_plan_table=False, enable_model_summary=False)
trainer.fit(Classifier(), datamodule=Points())
