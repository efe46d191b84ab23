roomier plan --model gpt2-xl --hardware rtx-4090 --trainer.precision bf16-mixed
