"""``python -m forgekit``, for ``torchrun -m forgekit run NAME`` and the like."""

import sys

from forgekit.cli import main

if __name__ == "__main__":
    sys.exit(main())
