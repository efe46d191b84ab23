roomier export runs/version_0/checkpoints/*step=8 --to hugging-face exported
