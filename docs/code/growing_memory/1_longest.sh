roomier plan --model gpt2 --hardware rtx-4090 --trainer.precision bf16-mixed --strategy single --seq_len 256
roomier plan --model gpt2 --hardware rtx-4090 --trainer.precision bf16-mixed --strategy single --seq_len 1024
