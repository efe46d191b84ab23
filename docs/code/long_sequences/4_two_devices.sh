roomier fit --model project.Llama --data project.Tokens --trainer.max_epochs 1 --seed_everything 0 \
    --trainer.devices 2 --trainer.strategy '{"name": "zero2", "context_parallel_size": 2}'
