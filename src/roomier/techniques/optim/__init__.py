"""Optimizers and learning rate schedules, selected by a string or returned by ``configure_optimizers``."""
