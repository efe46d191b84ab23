roomier fit --model project.Llama --data project.Tokens --trainer.max_epochs 1 --seed_everything 0
