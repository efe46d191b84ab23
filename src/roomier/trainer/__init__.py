"""Trainer: keywords -> Plan -> Engine -> fit. No logic of its own."""

from roomier.trainer.trainer import Trainer

__all__ = ["Trainer"]
