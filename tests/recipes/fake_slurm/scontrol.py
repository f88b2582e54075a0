"""``scontrol`` without a cluster: ``show hostnames LIST`` and ``requeue JOB``."""

from __future__ import annotations

import json
import re
import sys

import sbatch


def main() -> int:
    """Run one command."""
    command, *rest = sys.argv[1:]
    if (command, rest[0]) == ("show", "hostnames"):
        return show_hostnames(rest[1])
    assert (command, rest) == ("requeue", [sbatch.job_id()])
    if not json.loads((sbatch.HERE / "job.json").read_text())["requeue"]:
        sys.stderr.write("Requested operation is presently disabled for job\n")
        return 1
    (sbatch.HERE / "requeue").touch()
    return 0


def show_hostnames(nodes: str) -> int:
    """Write one node per line."""
    match = re.fullmatch(r"(.+)\[(\d+)-(\d+)\]", nodes)
    assert match is not None
    for number in range(int(match[2]), int(match[3]) + 1):
        sys.stdout.write(f"{match[1]}{number}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
