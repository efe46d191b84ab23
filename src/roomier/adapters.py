"""LoRA adapters on a frozen model: their weights, files of them, and the merged model."""

from roomier.checkpoint.export.adapter import export_adapter
from roomier.techniques.adapters.lora import adapter_state, merge_lora

__all__ = ["adapter_state", "export_adapter", "merge_lora"]
