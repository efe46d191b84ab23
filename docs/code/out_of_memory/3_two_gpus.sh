roomier plan --model gpt2-xl --hardware rtx-4090:2 --trainer.precision bf16-mixed \
    --strategy zero2 --trainer.activation_checkpointing full
