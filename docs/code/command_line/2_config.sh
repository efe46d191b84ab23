roomier fit --config run.yaml --seed_everything 0 --trainer.max_epochs 1 --optimizer SGD --optimizer.lr 0.1
