"""The classes of the optimizers that a name selects."""

from roomier.plan.choices import OPTIMIZERS

CLASSES = {name: each.load() for name, each in OPTIMIZERS.items()}
