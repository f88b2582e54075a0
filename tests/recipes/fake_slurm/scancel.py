"""``scancel`` without a cluster: ends a job with SIGTERM to its tasks and to the batch shell."""

from __future__ import annotations

import sys

import sbatch

if __name__ == "__main__":
    assert sys.argv[1:] == [sbatch.job_id()]
    (sbatch.HERE / "cancel").touch()
