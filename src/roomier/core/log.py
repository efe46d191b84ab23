"""The library's own messages: one logger, one way to tell the user something that matters."""

import logging
import sys

logger = logging.getLogger("roomier")


def notice(message: str) -> None:
    """Print one line the user must see, on standard error, so that standard output stays data."""
    print(f"roomier: {message}", file=sys.stderr, flush=True)
