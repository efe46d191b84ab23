"""Conversion of DeepSpeed configurations to arguments of the Trainer."""
