"""The ``roomier`` command. Modules that import torch or jsonargparse are loaded only when a verb runs."""
