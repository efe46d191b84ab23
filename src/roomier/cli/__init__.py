"""The ``roomier`` command. torch and jsonargparse are imported only when a verb runs."""
