roomier plan --hf config.json --hardware h100 --strategy single --trainer.precision bf16-mixed --batch_size 1 \
    --seq_len 16384 --trainer.activation_checkpointing full --trainer.chunked_loss true --what_if
