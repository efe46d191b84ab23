roomier export runs --to safetensors weights
ls weights
