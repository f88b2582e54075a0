"""A run directory's lock, status, history and configuration.

``.lock`` lets one process at a time write there, ``config.json`` is what the run was really started
with (what has changed since is in ``config_changes.jsonl``), ``status.json`` says how it ended, and
``history.jsonl`` keeps each start and end.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forgekit.checks import brief, check_choice, flat, parse_json
from forgekit.files import (
    UNSUPPORTED,
    append_lines,
    is_locked,
    overwrite,
    read_regular,
    write_atomic,
)
from forgekit.state import TrainState

log = logging.getLogger("forgekit")

STATUSES = ("running", "finished", "stopped", "failed")
_CONSTANTS = MappingProxyType({"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"})


class RunLockedError(RuntimeError):
    """Another process holds this run directory."""


def in_use(out: object, holder: str) -> RunLockedError:
    """Build the error that names the holder of a run directory."""
    return RunLockedError(
        f"{out} is in use by {holder or 'another process'}. Wait until that run has ended, stop "
        "it, or choose another run directory."
    )


def check_directory(folder: Path) -> None:
    """Raise, before set-up, for a directory that cannot be written or that holds a model.

    Raises:
        OSError: If it cannot be made or written.
        ValueError: If it holds a model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    if any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} contains a model, whose config.json would be overwritten by the run's. "
            "Choose another run directory, out=DIR."
        )


@contextmanager
def lock_run(
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    patience_s: float = 0.0,
) -> Iterator[None]:
    """Lock the run directory for this process; a second run into it raises at once.

    The system drops the lock when the process dies, however it dies, so a lock that is left behind
    cannot block a restart. Workers that outlived their launcher do hold it, which is the point:
    they still write.

    Args:
        out: The run directory; made if it does not exist.
        name: What the run directory is called in messages, if it is a copy.
        patience_s: Seconds to wait for a process that holds it.

    Raises:
        RunLockedError: If another process holds it.
    """
    path = Path(out) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        deadline = time.monotonic() + patience_s
        while patience_s and is_locked(path) and time.monotonic() < deadline:
            time.sleep(0.1)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise in_use(name or out, file.read()) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning(
                "%s cannot be locked (%s): make sure that no other run writes there",
                *(out, error.strerror),
            )
        file.truncate(0)
        file.write(f"pid {os.getpid()} on host {socket.gethostname()}")
        file.flush()
        yield


def write_status(out: str | os.PathLike[str], status: str, **fields: Any) -> None:
    """Write ``status.json``, a run's outcome for scripts that cannot rely on exit codes.

    torchrun turns each exit code into 1, a clean stop included. Where no new file can be written,
    as on a full disk, the old one is overwritten: better torn by a crash than out of date.

    Args:
        out: The run directory; made if it does not exist.
        status: "running", "finished", "stopped" or "failed".
        **fields: What else to say, for example ``step``, ``samples``, ``reason``. ``time`` (UTC)
            is added.

    Raises:
        ValueError: If ``status`` is not one of the four.
    """
    check_choice("status", status, STATUSES)
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


def append_history(out: Path, event: str, **fields: Any) -> None:
    """Append to ``history.jsonl``, which keeps all starts and ends.

    A run whose last event is "started" runs or was killed. An event that cannot be written, as on
    a full disk, is lost with a warning: no run fails because of it.

    Args:
        out: The run directory.
        event: "started", "rolled_back", "finished", "stopped" or "failed".
        **fields: What else to say. ``time`` (UTC) is added.
    """
    record = {"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds")} | fields
    try:
        append_lines(out / "history.jsonl", [json.dumps(record, default=str)])
    except OSError as error:
        log.warning("%s: %s could not be noted in history.jsonl: %s", out, event, error)


def keep_config(out: Path, config: Mapping[str, Any], state: TrainState) -> str:
    """Write ``config.json``, and differences from the previous one to ``config_changes.jsonl``.

    A checkpoint decides the seed of a run that is resumed, so ``seed`` is that of the state. Going
    back through the changes, from the last to the first, gives each earlier configuration.

    Args:
        out: The run directory.
        config: The resolved configuration.
        state: The state that the run starts from.

    Returns:
        The changes as one line of text; empty if there are none.
    """
    path = out / "config.json"
    # Strict JSON has no infinity: it is written as "inf", which a configuration reads back.
    actual = json.loads(json.dumps(config, default=str), parse_constant=_CONSTANTS.get)
    if "seed" in actual:
        actual["seed"] = state.seed
    try:
        before = parse_json(read_regular(path))
    except (OSError, ValueError):
        before = None
    old, new = dict(flat(before if isinstance(before, dict) else actual)), dict(flat(actual))
    changed = {k: [old.get(k), new.get(k)] for k in old | new if old.get(k) != new.get(k)}
    if changed:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"step": state.step, "samples": state.samples, "time": now, "changed": changed}
        append_lines(out / "config_changes.jsonl", [json.dumps(record)])
    write_atomic(path, f"{json.dumps(actual, indent=2)}\n".encode())
    return ", ".join(f"{key} {brief(was)} -> {brief(now)}" for key, (was, now) in changed.items())
