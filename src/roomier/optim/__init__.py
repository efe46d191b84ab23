"""Optimizers and learning-rate schedules: by name, or as ``configure_optimizers`` gives them."""
