"""Working directory of this process when roomier was imported."""

import os
from contextlib import suppress

FOLDER_AT_IMPORT: str | None = None
with suppress(OSError):  # the folder was removed
    FOLDER_AT_IMPORT = os.getcwd()
