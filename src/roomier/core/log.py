"""The library's own messages: one way to tell the user something that matters."""

import os
import sys


def notice(message: str) -> None:
    """Print one line the user must see, on standard error, so that standard output stays data.

    Of several ranks the first one alone prints: launchers tell each process its number in ``RANK``.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"roomier: {message}", file=sys.stderr, flush=True)
