"""The folder in which this process was started, as far as it is known when roomier is imported."""

import os
from contextlib import suppress

FOLDER_AT_IMPORT: str | None = None
with suppress(OSError):  # the folder was removed
    FOLDER_AT_IMPORT = os.getcwd()
