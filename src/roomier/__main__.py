"""``python -m roomier`` runs the command ``roomier``, for launchers that take a module, such as ``torchrun -m``."""

import sys

from roomier.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
