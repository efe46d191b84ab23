roomier fit --config run.yaml --trainer.max_epoch 3 --trainer.precison bf16-mixed
