"""LoRA adapters on a frozen model, and frozen weights that are quantized to 8 or 4 bits."""
