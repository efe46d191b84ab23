"""Select fp32, tf32, bf16 or fp16 with the keywords ``precision`` and ``matmul_precision``."""

from autoencoder import LitAutoEncoder, loader

from roomier import Trainer, seed_everything

for precision, matmul_precision in [("32-true", "highest"), ("32-true", "high"), ("bf16-mixed", "highest")]:
    seed_everything(0)
    trainer = Trainer(max_epochs=2, precision=precision, matmul_precision=matmul_precision, logger=False)
    trainer.fit(LitAutoEncoder(), loader(), loader(64))
    [metrics] = trainer.validate(dataloaders=loader(64))
    print(f"{precision}, matmul {matmul_precision}: {metrics['val_loss']:.4f}")
    assert metrics["val_loss"] < 3.5
