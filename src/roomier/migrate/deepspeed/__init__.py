"""Configurations of DeepSpeed as arguments of the Trainer."""
