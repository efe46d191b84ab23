"""``python -m roomier`` runs the ``roomier`` command, for launchers that accept a module, such as ``torchrun -m``."""

import sys

from roomier.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
