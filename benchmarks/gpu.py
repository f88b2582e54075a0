"""Everything that only an accelerator can answer, within a limit of seconds.

python benchmarks/gpu.py [PART ...] --device cuda --limit 540 --out FILE.jsonl

Parts run in order of value, each in a process of its own and under a limit of its own, never beyond
what is left of ``--limit``. Each row is a line of JSON that is written at once: a run that is cut
off, or a part that dies, loses no row before it. On a CPU, sizes are those of a test. Exits with 0
if every part ran to its end and no verdict is FAIL. ``plan`` runs only if it is named: what
`forgekit plan` predicts for the set-ups of ``mfu``, on any machine, before.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PARTS = ("smoke", "exact", "eager", "mfu", "compiled", "kernels")
PARTS += ("losses", "sampling", "graphs", "on_policy", "memory")
"""In order of value."""
LIMITS = dict.fromkeys(PARTS, 50.0) | {"smoke": 90.0, "eager": 80.0, "mfu": 170.0}
LIMITS |= {"compiled": 110.0, "plan": 3600.0}
"""Most seconds of each part."""
GRACE_S = 2.0
"""After its limit a part has this long to end by itself."""
BAD_FORK = 77
"""Exit code of a forked process that cannot use the device, because an import had touched it."""
PACKAGES = {"torch", "triton", "tensordict", "numpy", "accelerate", "lightning", "transformers"}
NUMBERS = {"ms": ".2f", "ratio": ".3f", "band": ".3f", "tokens_per_second": ",.0f", "mfu": ".3f"}
GOOD = {"ok", "-", "missing", "does not fit", "not on this device"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one of them did not end well."""
    options, began = _parse(argv), time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {d.name: d.version for d in distributions() if d.name in PACKAGES}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    append(options.out, {"part": "run", "date": date, "argv": sys.argv, "versions": versions})
    # A process that has imported everything is forked for each part; it must not touch the device.
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import gpu_parts  # noqa: F401

    verdicts = set()
    for name in options.parts or PARTS:
        before = options.out.stat().st_size
        left = began + options.limit - GRACE_S - time.monotonic()
        append(options.out, _run_part(name, left, options))
        for row in map(json.loads, options.out.read_bytes()[before:].splitlines()):
            words = [row.get(key, "") for key in ("part", "what", "entry", "verdict", "note")]
            words += [f"{key} {row[key]:{form}}" for key, form in NUMBERS.items() if key in row]
            sys.stdout.write(" | ".join(filter(None, words)) + "\n")
            verdicts.add(row["verdict"])
        sys.stdout.flush()
    return int(not verdicts <= GOOD)


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row at once: this process may die at any time, and others write here too."""
    with path.open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What only an accelerator can answer.")
    option = parser.add_argument
    option("parts", metavar="PART", nargs="*", help=f"{', '.join(LIMITS)} (all but plan)")
    option("--device", default="cuda", help="where to run (cuda)")
    option("--limit", type=float, default=540, help="seconds of all parts together (540)")
    option("--out", type=Path, default=Path("build/gpu.jsonl"), help="rows are added to it")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(LIMITS):
        parser.error(f"no part {', '.join(unknown)}; parts are {', '.join(LIMITS)}.")
    return options


def _run_part(name: str, left: float, options: argparse.Namespace) -> dict[str, Any]:
    row, limit = {"part": name, "what": "the whole part"}, min(LIMITS[name], left)
    if limit <= 0:
        return row | {"verdict": "no time left"}
    began = time.monotonic()
    for start in ("fork", "spawn"):
        process = get_context(start).Process(target=_work, args=(name, limit, options))
        process.start()
        process.join(limit + GRACE_S)
        if process.is_alive():  # stuck where nothing ends by itself, as in a driver
            process.kill()
            process.join()
        if process.exitcode != BAD_FORK:
            break
    seconds, code = time.monotonic() - began, process.exitcode
    verdict = "ok" if code == 0 else "over its limit" if seconds >= limit else "FAIL"
    note = f"{seconds:.1f} of at most {limit:.1f} s, exit code {code}"
    return row | {"verdict": verdict, "note": note, "seconds": seconds}


def _work(name: str, limit: float, options: argparse.Namespace) -> None:
    """In a part's own process: past the limit it ends, and the log says where it stood."""
    import gpu_parts
    import torch

    if getattr(torch.get_device_module(options.device), "_is_in_bad_fork", bool)():
        sys.exit(BAD_FORK)
    with options.out.with_suffix(".log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(limit, exit=True)
    for row in gpu_parts.rows_of(name, options.device):
        append(options.out, row)


if __name__ == "__main__":
    sys.exit(main())
