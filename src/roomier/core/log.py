"""The library's own messages: one way to tell the user something that matters."""

import sys


def notice(message: str) -> None:
    """Print one line the user must see, on standard error, so that standard output stays data."""
    print(f"roomier: {message}", file=sys.stderr, flush=True)
