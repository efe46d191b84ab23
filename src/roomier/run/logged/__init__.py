"""Values that a module logs, reduced over an epoch and across ranks."""
