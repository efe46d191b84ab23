"""LoRA adapters on a frozen model, and frozen weights that are quantized to 8 or 4 bits."""

from roomier.adapters.lora import adapter_state, merge_lora

__all__ = ["adapter_state", "merge_lora"]
