"""A module that cannot be imported."""

raise ZeroDivisionError("a bug at import")
