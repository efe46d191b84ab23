"""Errors for imports from ``roomier.strategies``, see ``roomier/plugins.py``."""

from roomier.plugins import __getattr__ as __getattr__
