roomier plan --model gpt2-xl --hardware rtx-4090 --trainer.precision bf16-mixed --strategy single \
    || echo "exit code: $?"
