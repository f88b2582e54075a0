"""Attempts of a run that torchrun restarts: ``torchrun --nnodes=1:8 --max-restarts=N``.

torchrun's agents, one per machine, start all workers anew when one has failed, when an agent is
lost and when one comes; ``--max-restarts`` bounds how often. So the ranks of an attempt meet before
anything else, and bring the agents that started them: an earlier attempt may still hold the run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from forgekit.environment import identity, rendezvous, restarts
from forgekit.metrics.records import read_objects
from forgekit.remote.urls import Location, Url, content_of, fs_of, retried
from forgekit.run.mirror import Mirror, held_run
from forgekit.run.rendezvous import HangError, RankStore
from forgekit.run.status import RunLockedError

LATE_S = 120.0
"""Longest time between an attempt's first and last rank; their agents have just met."""
HELD_S = 120.0
"""How long workers of an earlier attempt may hold the run, until they see the request."""
PAUSE_S = 30.0
"""Pause between attempts on a number of ranks that cannot share the run."""
REASONS_S = 5.0
"""How long ranks wait for the reason of a run's end, or for its readers."""
WANTED = "another attempt"
"""Stop reason of workers whose agent was presumed dead: a later attempt needs the run."""
LEAVING = ("SIG", "launcher is gone", "another rank", WANTED)
"""First words of the reasons for which a rank leaves while the others go on."""


@attrs.frozen
class Attempt:
    """One start of a run.

    Attributes:
        facts: Facts for ``history.jsonl``: as ``agents`` the processes that restart its workers,
            ``host/pid@start``; empty without restarts.
        has_run: Whether the run has taken steps that one of them started.
        store: Where its ranks met, with the reason of the first that failed.
    """

    facts: Mapping[str, Any] = attrs.field(factory=dict)
    has_run: bool = False
    store: Any = None

    def first_failure(self, reason: str = "") -> str:
        """Report this rank's reason for failing, if any; return the first that a rank reported.

        Rank 0 alone writes, and of another's failure it hears a lost connection, or SIGTERM.
        """
        with suppress(Exception):  # rank 0, and its store, may be gone
            if self.store is not None and (reason or self.store.check(["failed"])):
                reason = self.store.compare_set("failed", "", reason).decode()
        return reason


@contextmanager
def hold_run(
    folder: Path, url: Url | None = None, *, is_writer: bool
) -> Iterator[tuple[Attempt, Mirror | None]]:
    """Hold the run directory, as ``held_run``; under a restarting torchrun all ranks meet first.

    Args:
        folder: The run directory, or where this machine works on it.
        url: Where it is, if it is behind a URL.
        is_writer: Whether this is rank 0.

    Raises:
        RunLockedError: If another process holds the directory; where workers are restarted on all
            ranks, and only after workers of an earlier attempt have had two minutes to end.
        HangError: If a rank does not come.
        ValueError: If the workers of a later attempt would meet in the store of an earlier one.
    """
    if not restarts(os.environ):
        with held_run(folder, url) if is_writer else nullcontext() as mirror:
            yield Attempt(), mirror
        return
    out, (rank, world, _) = url or folder, identity(os.environ)
    ranks = RankStore(dist.PrefixStore(f"forgekit/{out}", _connect()), rank, tuple(range(world)))
    agents = sorted({*ranks.gather("agents", "the start", _agent(), LATE_S).values()})
    mirror, events, problem = None, [], None
    with ExitStack() as stack:
        try:
            if is_writer:
                folder.mkdir(parents=True, exist_ok=True)
                _ask_for(out, os.environ["TORCHELASTIC_RUN_ID"])
                mirror = stack.enter_context(held_run(folder, url, HELD_S))
                _ask_for(out, "")
                events = read_objects(folder / "history.jsonl")
        except (RunLockedError, OSError) as error:
            problem = error
        starts = [event.get("agents", ()) for event in events if event.get("event") == "started"]
        outcome = [problem and str(problem), any({*agents} & {*before} for before in starts)]
        failure, has_run = ranks.gather("held", "the run directory", outcome, LATE_S + HELD_S)[0]
        if failure:
            with suppress(Exception):  # until all have read it: the store ends with rank 0
                ranks.gather("read", "the run directory", None, REASONS_S)
            raise problem or RunLockedError(failure)
        yield Attempt({"agents": agents}, has_run, ranks.store), mirror


def check_connections() -> None:
    """Raise if a rank died in set-up: its closed connection fails here; a store would wait.

    Raises:
        RuntimeError: If one has died, as gloo says it.
    """
    if restarts(os.environ) and dist.is_initialized():
        dist.all_reduce(torch.zeros(()))


def is_wanted(out: Location) -> bool:
    """Whether a later attempt of this job waits for the run directory.

    An agent that stalls is presumed dead without being notified; its workers would go on alone.
    """
    with suppress(OSError):
        job = content_of(out / ".wanted", patience_s=0.0)
        return job == os.environ["TORCHELASTIC_RUN_ID"].encode()
    return False


def _ask_for(out: Location, job: str) -> None:
    """Request the run directory for a job; an empty name withdraws the request."""
    if isinstance(out, Path):
        (out / ".wanted").write_text(job)
    else:
        fs, root = fs_of(out)
        retried(lambda: fs.pipe_file(f"{root}/.wanted", job.encode()), out)


def is_left(reason: str | None) -> bool:
    """Whether torchrun should restart a stopped run on the remaining ranks.

    A signal, or the death of a launcher, means one machine. A budget or a stop file mean the run.

    Args:
        reason: Why this rank stopped, as ``StopSignal.reason``.
    """
    ranks = RankStore.of(range(dist.get_world_size() if dist.is_initialized() else 1))
    reasons = {0: reason}
    if ranks is not None:
        with suppress(Exception):  # a rank that does not answer was killed meanwhile
            reasons = ranks.gather("reasons", "the run has stopped", reason, REASONS_S)
    return all(str(reason).startswith(LEAVING) for reason in reasons.values())


def _connect() -> dist.TCPStore:
    """Connect to the first rank's store, which the process groups will use too."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            f"with --max-restarts={restarts(os.environ)} a restart by torchrun would hang: it "
            "reuses the store of the previous attempt, which has keys of dead ranks. Start "
            "torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or with --max-restarts=0."
        )
    rank, _, _ = identity(os.environ)
    at = rendezvous(os.environ)
    address = at["MASTER_ADDR"], int(at["MASTER_PORT"])
    deadline = time.monotonic() + LATE_S
    while rank != 0:  # the store's own wait would block signals
        with suppress(OSError), socket.create_connection(address, timeout=1.0):
            break
        if time.monotonic() > deadline:
            raise HangError(f"rank 0 did not come within {LATE_S:g} s: a machine may be lost.")
        time.sleep(0.05)
    # as in init_process_group
    return dist.TCPStore(*address, is_master=rank == 0, wait_for_workers=False, multi_tenant=True)


def _agent() -> str:
    """Identify the parent process by id and start time: restarted containers reuse ids.

    The time is in clock ticks since the machine was booted, the 22nd field of ``proc_pid_stat(5)``.
    """
    pid = os.getppid()
    _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return f"{socket.gethostname()}/{pid}@{fields.split()[19]}"
