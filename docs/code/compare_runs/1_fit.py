from project import Classifier, Points

import roomier

for learning_rate in (0.003, 0.03):
    roomier.seed_everything(0)
    trainer = roomier.Trainer(
        max_epochs=4,
        log_every_n_steps=5,
        callbacks=[roomier.callbacks.Throughput()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_plan_table=False,
    )
    trainer.fit(Classifier(learning_rate=learning_rate), Points())
