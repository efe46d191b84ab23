roomier plan --model gpt2-xl --hardware rtx-4090 --strategy single --trainer.precision bf16-mixed \
    --trainer.activation_checkpointing full --trainer.chunked_loss true --trainer.optimizer adamw8bit
