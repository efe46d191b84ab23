"""Use several loggers together."""

from pathlib import Path

from autoencoder import LitAutoEncoder, loader

from roomier import Trainer
from roomier.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

store = Path("runs/mlflow").absolute().as_uri()
managers = [
    TensorBoardLogger(),
    WandbLogger(project="autoencoder", offline=True),
    MLFlowLogger(experiment_name="autoencoder", tracking_uri=store),
    CSVLogger(),
]
trainer = Trainer(logger=managers, max_epochs=1, log_every_n_steps=4, default_root_dir="runs/managers")
trainer.fit(LitAutoEncoder(), loader(), loader(64))

rows = (Path(trainer.log_dir) / "metrics.csv").read_text().splitlines()
print(rows[0], rows[-1], sep="\n")
assert len(rows) >= 8
