"""What a user implements: Module, DataModule, Callback, Logger; and the table of their hooks."""
