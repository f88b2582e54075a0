"""``forgekit doctor``: whether this machine, folder and job can do what a run needs."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgekit.cli.usage import file_path
from forgekit.environment import identity
from forgekit.terminal import printable

if TYPE_CHECKING:
    from forgekit.doctor import Check

SIGNS = {"good": "ok  ", "note": "note", "bad": "BAD "}


def add_doctor(commands: Any) -> None:
    """Declare ``forgekit doctor`` and its arguments."""
    doctor = commands.add_parser(
        "doctor", help="check versions, devices, a run directory, and the ranks of a job"
    )
    where = "a run directory, or where it is to be (this folder)"
    doctor.add_argument("out", metavar="OUT", nargs="?", type=file_path, default=".", help=where)
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Print what is good and bad; started by torchrun or srun, the first rank does, for all."""
    from forgekit.doctor import check_folder, check_installed

    out, bad = Path(options.out), 0
    rank, world, _ = identity(os.environ)
    if rank == 0:
        bad += _show("installed", check_installed())
        bad += _show(f"folder {out.absolute()}", check_folder(out))
    ranks = _ranks(out, world)  # last, since ranks that do not meet wait
    if rank:
        return 0
    bad += _show(f"{world} ranks" if world > 1 else "two ranks, started for this check", ranks)
    problems = f"{bad} problem{'s' * (bad > 1)} to fix before a run"
    print(f"\n{problems}" if bad else "\nready")
    return 1 if bad else 0


def _ranks(out: Path, world: int) -> list[Check]:
    """What ranks can do together: those of the job, or two that are started here."""
    from forgekit.doctor import Check, check_ranks
    from forgekit.mesh import shutdown
    from forgekit.verification.local_ranks import run_local_ranks

    if world > 1:
        try:
            return check_ranks(str(out))
        finally:
            shutdown()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = run_local_ranks(check_ranks, 2, str(out), folder=Path(folder), timeout_s=60.0)
        except Exception as error:
            remedy = "Look at /etc/hosts and the firewall: ranks talk over TCP."
            return [Check("sum on cpu", "bad", f"{str(error).rstrip('.')}. {remedy}")]
    return ranks[0]


def _show(title: str, checks: Iterable[Check]) -> int:
    """Print checks as they are made; returns how many are bad."""
    print(f"\n{printable(title)}")
    bad = 0
    for check in checks:
        bad += check.outcome == "bad"
        print(f"  {SIGNS[check.outcome]}  {check.name:<18} {printable(check.text)}", flush=True)
    return bad
