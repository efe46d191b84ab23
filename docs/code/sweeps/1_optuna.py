import optuna
from project import QUIET, Classifier, loaders

import roomier
from roomier.callbacks import OptunaPruning
from roomier.sweeps import OptunaStudy


def objective(trial):
    roomier.seed_everything(0)
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    width = trial.suggest_categorical("width", [16, 64])
    trainer = roomier.Trainer(
        devices=2,
        accelerator="cpu",
        max_epochs=5,
        callbacks=[OptunaPruning(trial, monitor="val_loss")],
        **QUIET,
    )
    trainer.fit(Classifier(width, lr), *loaders())
    return trainer.callback_metrics["val_loss"]


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = OptunaStudy(
    direction="minimize",
    storage="sqlite:///sweep.db",
    study_name="classifier",
    load_if_exists=True,
    sampler=optuna.samplers.TPESampler(seed=0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
)
study.optimize(objective, n_trials=8)
if study.is_global_zero:
    for trial in study.trials:
        print(f"{trial.state.name:8}  {trial.params['lr']:.5f}  {trial.params['width']}")
    print("best:", study.best_params)
