"""``scontrol`` without a cluster: ``show hostnames LIST`` and ``requeue JOB``."""

from __future__ import annotations

import os
import re
import sys

import sbatch


def main() -> int:
    """Run one command."""
    command, *rest = sys.argv[1:]
    if (command, rest[0]) == ("show", "hostnames"):
        return show_hostnames(rest[1])
    assert (command, rest) == ("requeue", [sbatch.job_id()])
    if os.environ["FAKE_SLURM_REQUEUE"] != "True":
        sys.stderr.write("Requested operation is presently disabled for job\n")
        return 1
    (sbatch.HERE / "requeue").touch()
    return 0


def show_hostnames(nodes: str) -> int:
    """Write one node per line."""
    ((name, first, last),) = re.findall(r"(.+)\[(\d+)-(\d+)\]", nodes)
    for number in range(int(first), int(last) + 1):
        print(f"{name}{number}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
