"""Accelerators through ``torch.accelerator``: names, capabilities, streams, memory, random states, and copies of
batches."""
