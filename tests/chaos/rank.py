"""One rank of a run in which something goes wrong: ``rank.py RECIPE ARGUMENTS``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from chaos import faults

    from forgekit import environment

    environment.PARENT = os.getppid()  # which an import reads, and a forked process does not make
    given = json.loads(os.environ["FORGEKIT_TEST_FAULTS"])
    faults.run(sys.argv.pop(1), given.get(os.environ.get("RANK", "0"), {}))
