"""Base classes that users subclass (Module, DataModule, Callback, Logger) and the table of their hooks."""
