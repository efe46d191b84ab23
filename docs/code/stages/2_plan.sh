roomier plan --model gpt2 --hardware a100-40gb:2 --batch_size 4 --trainer.precision bf16-mixed \
    --trainer.accumulate_grad_batches 8 --trainer.strategy '{"name": "ddp", "pipeline_parallel_size": 2}'
