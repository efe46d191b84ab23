roomier plan --model gpt2-xl --hardware a100-40gb:8 --trainer.precision bf16-mixed
