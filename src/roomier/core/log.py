"""The library's own messages: one way to tell the user something that matters."""

import os
import sys


def is_first_rank() -> bool:
    """Whether this process is the only one, or the first, of its job: launchers tell each its number in ``RANK``."""
    return os.environ.get("RANK", "0") == "0"


def notice(message: str, *, every_rank: bool = False) -> None:
    """Print one line the user must see, on standard error, so that standard output stays data.

    Of several ranks the first one alone prints, but for what holds of one rank: ``every_rank`` that calls it.
    """
    if every_rank or is_first_rank():
        print(f"roomier: {message}", file=sys.stderr, flush=True)
