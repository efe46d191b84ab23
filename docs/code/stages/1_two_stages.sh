roomier fit --model project.Llama --data project.Tokens --trainer.max_epochs 1 --seed_everything 0 \
    --trainer.devices 2 --trainer.accumulate_grad_batches 4 \
    --trainer.strategy '{"name": "ddp", "pipeline_parallel_size": 2}'
