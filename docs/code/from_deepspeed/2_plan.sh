roomier plan --model gpt2 --hardware a100-80gb:8 --deepspeed ds_config.json
