"""Which plans there are, which is the fastest that fits, and what to do where none does."""
