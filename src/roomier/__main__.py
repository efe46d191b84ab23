"""``python -m roomier`` is the command ``roomier``: for starters that take a module, such as ``torchrun -m``."""

import sys

from roomier.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
