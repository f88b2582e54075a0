"""One process per run directory, and ``status.json``, which says how a run ended."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgekit.files import (
    UNSUPPORTED,
    append_lines,
    is_locked,
    overwrite,
    read_regular,
    write_atomic,
)
from forgekit.inputs import check_choice, parse_json

log = logging.getLogger("forgekit")

STATUSES = ("running", "finished", "stopped", "failed")


class RunLockedError(RuntimeError):
    """Another process writes into this run directory."""


@contextmanager
def lock_run(out: str | os.PathLike[str], *, is_writer: bool = True) -> Iterator[None]:
    """Hold the run directory for this process; a second run into it is refused at once.

    The system drops the lock when the process dies, however it dies, so a lock that is left behind
    cannot block a restart. Workers that outlived their launcher do hold it, which is the point:
    they still write.

    Args:
        out: The run directory; made if it does not exist.
        is_writer: False on all ranks but the first, which then hold nothing.

    Raises:
        RunLockedError: If another process holds it.
    """
    if not is_writer:
        yield
        return
    path = Path(out) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunLockedError(
                f"{out} is in use by {file.read() or 'another process'}. Wait until that run has "
                "ended, stop it, or choose another run directory."
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning(
                "%s cannot be locked (%s): see to it yourself that no second run writes there",
                *(out, error.strerror),
            )
        file.truncate(0)
        file.write(f"pid {os.getpid()} on host {socket.gethostname()}")
        file.flush()
        yield


def write_status(
    out: str | os.PathLike[str], status: str, *, is_writer: bool = True, **fields: Any
) -> None:
    """Write ``status.json``: how a run ended, for scripts that cannot trust exit codes.

    torchrun turns each exit code into 1, a clean stop included. Where no new file can be written,
    as on a full disk, the old one is overwritten: better torn by a crash than out of date.

    Args:
        out: The run directory; made if it does not exist.
        status: "running", "finished", "stopped" or "failed".
        is_writer: False on all ranks but the first, which then write nothing.
        **fields: What else to say, for example ``step``, ``samples``, ``reason``. ``time`` (UTC)
            is added.

    Raises:
        ValueError: If ``status`` is not one of the four.
    """
    check_choice("status", status, STATUSES)
    if not is_writer:
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    content = json.dumps({"status": status, "time": now} | fields, indent=2, default=str)
    path, encoded = Path(out) / "status.json", f"{content}\n".encode()
    try:
        write_atomic(path, encoded)
    except OSError:
        if not path.is_file():
            raise
        with path.open("r+b", buffering=0) as file:
            overwrite(file, 0, encoded, file.read())


def is_running(out: str | os.PathLike[str]) -> bool:
    """Whether a run goes on: ``status.json`` says so, and a living process holds the directory.

    The status of a run that was killed says "running" for good. From another machine only a file
    system that shares locks shows the holder; there the ``time`` of the status tells, which a run
    renews every half a minute while it takes steps.

    Args:
        out: The run directory.
    """
    try:
        status = parse_json(read_regular(Path(out) / "status.json"))
    except (OSError, ValueError):
        return False
    is_said = isinstance(status, dict) and status.get("status") == "running"
    return is_said and is_locked(Path(out) / ".lock")


def append_history(
    out: str | os.PathLike[str], event: str, *, is_writer: bool = True, **fields: Any
) -> None:
    """Append to ``history.jsonl``, which keeps each start and end that ``status.json`` forgets.

    A run whose last event is "started" runs or was killed. An event that cannot be written, as on
    a full disk, is lost with a warning: no run fails because of it.

    Args:
        out: The run directory.
        event: "started", "rolled_back", "finished", "stopped" or "failed".
        is_writer: False on all ranks but the first, which then write nothing.
        **fields: What else to say. ``time`` (UTC) is added.
    """
    if not is_writer:
        return
    record = {"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds")} | fields
    try:
        append_lines(Path(out) / "history.jsonl", [json.dumps(record, default=str)])
    except OSError as error:
        log.warning("%s: %s could not be noted in history.jsonl: %s", out, event, error)
