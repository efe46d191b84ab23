cat > config.json << 'END'
{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
 "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 65536}
END
roomier plan --hf config.json --hardware h100 --strategy single --trainer.precision bf16-mixed --batch_size 1 \
    --seq_len 16384
