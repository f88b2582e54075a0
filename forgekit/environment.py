"""A launcher's environment variables, read strictly and without torch.

A wrong rank or world size would leave processes waiting for others that never come, so each
variable is checked before anything starts. Optional packages are imported here, too.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")

PACKAGE = str(Path(__file__).parent) + os.sep
RECIPES = PACKAGE + "recipes" + os.sep
PARENT = os.getppid()
"""Process id of the launcher; an orphan has another parent."""


def identity(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Read rank, world size and local rank from the variables of torchrun or srun.

    Without a local rank the rank takes its part; without rank or world size, the rest is a stray.
    In SLURM's batch script, which has the variables of a rank, nothing but srun starts the others:
    only their steps have a ``SLURM_STEP_ID``.

    Raises:
        ValueError: If a variable is not a whole number, or the rank is not in the world.

    Examples:
        >>> identity({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
        (5, 8, 1)
    """
    for names in (TORCHRUN, SLURM) if "SLURM_STEP_ID" in environment else (TORCHRUN,):
        rank, world, local = (_number(environment, name) for name in names)
        if rank is not None and world is not None:
            if rank >= world:
                rule = f"ranks of {names[1]}={world} processes are 0 to {world - 1}"
                raise _refusal(names[0], environment, rule)
            return rank, world, rank if local is None else local
    return 0, 1, 0


def local_world(environment: Mapping[str, str]) -> int | None:
    """Return the number of this job's processes on this machine, if the launcher sets it.

    Raises:
        ValueError: If it is not a whole number.
    """
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if environment.get(name):
            return _number(environment, name)
    return None


def rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT``: as set, from the SLURM job, or this machine.

    Raises:
        ValueError: If the address is empty, as after a command that failed: ranks on several
            machines would wait for each other; or if the SLURM job has no number or no node.
    """
    address = environment.get("MASTER_ADDR")
    if address is None:
        address = first_host(environment.get("SLURM_JOB_NODELIST", ""))
    elif not address.strip():
        raise _refusal("MASTER_ADDR", environment, "it names the machine of rank 0")
    job = _number(environment, "SLURM_JOB_ID") or 0
    port = environment.get("MASTER_PORT") or str(20_000 + job % 20_000)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    Raises:
        ValueError: If the list does not begin with the name of a host.

    Examples:
        >>> first_host("gpu[003-007,9],cpu1")
        'gpu003'
        >>> first_host("")
        '127.0.0.1'
    """
    if not nodes:
        return "127.0.0.1"
    match = re.match(r"([\w.\-]+)(?:\[(\w+)[\w,\-]*\][\w.\-]*)?(?=,|$)", nodes, re.ASCII)
    if match is None:
        raise _refusal("SLURM_JOB_NODELIST", {"SLURM_JOB_NODELIST": nodes}, "it names hosts")
    return match[1] + (match[2] or "")


def restarts(environment: Mapping[str, str]) -> int:
    """Return how often torchrun restarts this process after a failure; 0 without restarts.

    Raises:
        ValueError: If it is not a whole number.
    """
    return _number(environment, "TORCHELASTIC_MAX_RESTARTS") or 0


def end_launcher() -> None:
    """Make the torchrun that restarts this process exit with a non-zero code.

    It does not look at exit codes: what a restart cannot mend, it would repeat to its limit. A
    signal ends it, without an end to the rendezvous of the other agents.
    """
    if restarts(os.environ) and os.getppid() == PARENT:
        os.kill(PARENT, signal.SIGTERM)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is not None and not re.fullmatch("[0-9]{1,9}", text):
        raise _refusal(name, environment, "it must be an integer, 0 or more")
    return None if text is None else int(text)


def _refusal(name: str, environment: Mapping[str, str], rule: str) -> ValueError:
    text = environment.get(name, "")
    read = ascii(text if len(text) <= 40 else f"{text[:37]}...")
    return ValueError(
        f"the environment variable {name} is {read}; {rule}. torchrun and srun set it: start the "
        f"run with one of them, or unset {name}."
    )


def end_with_parent() -> None:
    """Exit when the process that started this one has ended; a killed one ends no children."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def is_library(file: str) -> bool:
    """Whether a source file is forgekit's own; recipes are the user's."""
    return file.startswith(PACKAGE) and not file.startswith(RECIPES)


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package; raise with the command that installs it.

    Args:
        module: The module to import, for example ``"pyarrow.parquet"``.
        extra: The extra of forgekit that installs the package.

    Returns:
        The module.

    Raises:
        ImportError: If the package is not installed.

    Examples:
        >>> require("json", extra="text").dumps([1])
        '[1]'
        >>> require("not_there", extra="text")
        Traceback (most recent call last):
        ImportError: not_there is not installed. Install it with: pip install "forgekit[text]"
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # a dependency of the installed package is missing
        raise ImportError(
            f'{package} is not installed. Install it with: pip install "forgekit[{extra}]"',
            name=package,
        ) from None
