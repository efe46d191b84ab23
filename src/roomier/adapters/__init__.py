"""Small trained parts on a frozen model, and frozen weights in few bits."""

from roomier.adapters.lora import adapter_state, merge_lora

__all__ = ["adapter_state", "merge_lora"]
