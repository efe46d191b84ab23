"""The ``roomier`` command. Importing this imports neither torch nor jsonargparse: a verb does when it runs."""
