"""What can go wrong in one rank of a run, done by the rank to itself.

Progress is what a moment is named by, never the clock: so many Python calls, a certain change of
the file system, a step. The functions run in a process that was forked for one run and ends with
it, so nothing is ever put back.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import s3fs
import torch
from buckets import IMPATIENT
from runs import draw_nothing, load_recipe

import forgekit as fk
from forgekit.checkpoints.save import wait_for_saves
from forgekit.run import Run, elastic, run_directory

Recipe = Any
"""A recipe's module, whose names a fault puts its own functions in the place of."""
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1 << 1


def run(name: str, faults: Mapping[str, Any]) -> None:
    """Run a recipe's ``main`` with these faults, each a function below and its argument."""
    recipe = load_recipe(name)
    fk.wrap_up = draw_nothing
    for fault, given in faults.items():
        globals()[fault](recipe, given)
    recipe.main()


@attrs.define
class _Now:
    """Where the run is: the step that is being computed and the first tokens of its rows."""

    step: int = -1
    rows: list[int] = attrs.field(factory=list)


@attrs.frozen
class _Group:
    """A group of micro-batches that tells ``now`` the rows that are used."""

    group: Any
    now: _Now

    def __len__(self) -> int:
        return len(self.group)

    @property
    def samples(self) -> int | None:
        return self.group.samples

    def __iter__(self) -> Iterator[Any]:
        self.now.rows.clear()
        for batch in self.group:
            self.now.rows.extend(batch["input_ids"][:, 0].tolist())
            yield batch


def _change_setup(recipe: Recipe, change: Callable[[Any], Any]) -> None:
    """Let a recipe's ``setup`` return ``change`` of what it has built."""
    setup = recipe.setup
    recipe.setup = lambda config: change(setup(config))


def _watch(recipe: Recipe, after: Callable[[_Now], object] = lambda now: None) -> _Now:
    """Follow the steps of a recipe; ``after`` is called when one has been computed."""
    now = _Now()

    def watched(built: Any) -> Any:
        def watched_step(state: Any, batches: Any) -> Any:
            now.step = state.step + 1
            answer = built.step(state, _Group(batches, now))
            after(now)
            return answer

        return attrs.evolve(built, step=watched_step)

    _change_setup(recipe, watched)
    return now


def _after(recipe: Recipe, step: int, act: Callable[[], object]) -> None:
    """Do something when a step has been computed."""
    _watch(recipe, lambda now: now.step == step and act())


def note_rows(recipe: Recipe, path: str) -> None:
    """Append each step with the first token of its rows to a file, before anything is saved."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(now: _Now) -> None:
        os.write(file, f"{json.dumps([now.step, now.rows])}\n".encode())

    _watch(recipe, note)


def note_attempts(recipe: Recipe, given: tuple[str, float]) -> None:
    """Append each step's attempt, ranks, time and rows to a file; let a step take some seconds."""
    path, seconds = given
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    at = [os.environ["MASTER_PORT"], int(os.environ["WORLD_SIZE"])]

    def note(now: _Now) -> None:
        os.write(file, f"{json.dumps([now.step, *at, time.time(), now.rows])}\n".encode())
        time.sleep(seconds)

    _watch(recipe, note)


def end_after(recipe: Recipe, step: int) -> None:
    """End the run after a step, without changing how many it is said to have."""
    is_over = Run.is_over
    Run.is_over = lambda self, state: state.step >= step or is_over(self, state)


def hurry(recipe: Recipe, seconds: float) -> None:
    """Wait this long where a run that is restarted waits for minutes; look as often for others."""
    elastic.HELD_S = 20 * seconds
    run_directory.PAUSE_S = run_directory.STATUS_EVERY_S = seconds


def raise_after(recipe: Recipe, step: int) -> None:
    """Raise an error after a step."""

    def fail() -> None:
        raise RuntimeError("this batch is bad")

    _after(recipe, step, fail)


def raise_in_set_up(recipe: Recipe, rank: int) -> None:
    """Raise an error on one rank when set-up is nearly done."""

    def failing(built: Any) -> Any:
        if os.environ["RANK"] == str(rank):
            raise RuntimeError("this machine has no tokenizer")
        return built

    _change_setup(recipe, failing)


def count_calls(recipe: Recipe, path: str) -> None:
    """Append how many Python calls a run has made up to the end of each step."""
    calls = _on_call(lambda _: None)

    def note(now: _Now) -> None:
        with Path(path).open("a") as file:
            file.write(f"{now.step} {calls[0]}\n")

    _watch(recipe, note)


def die_at_call(recipe: Recipe, number: int) -> None:
    """Kill all ranks when this one makes its so many-th Python call, in whatever thread."""

    def die(calls: int) -> None:
        if calls >= number:
            os.killpg(0, signal.SIGKILL)

    _on_call(die)


def _on_call(function: Callable[[int], None]) -> list[int]:
    calls = [0]

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[0] += 1
            function(calls[0])

    threading.setprofile(profile)
    sys.setprofile(profile)
    return calls


def die_before(recipe: Recipe, moment: tuple[str, str, int]) -> None:
    """Kill all ranks before the so many-th audited event whose arguments hold a text."""
    _before(moment, lambda: os.killpg(0, signal.SIGKILL))


def signal_before(recipe: Recipe, given: tuple[str, str, int, str]) -> None:
    """Send this rank a signal before such an event, and give it time to react."""
    *moment, name = given
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        signal.pthread_kill(main, getattr(signal, name))
        time.sleep(0.2)

    _before(moment, send)


def _before(moment: Sequence[Any], act: Callable[[], None]) -> None:
    event, text, number = moment
    seen = [0]

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event and text in " -> ".join(map(str, arguments)):
            seen[0] += 1
            if seen[0] == number:
                act()

    sys.addaudithook(hook)


def die_alone_after(recipe: Recipe, step: int) -> None:
    """Kill this rank, and no other, after a step."""
    _after(recipe, step, lambda: signal.raise_signal(signal.SIGKILL))


def signal_after(recipe: Recipe, given: tuple[int, list[str]]) -> None:
    """Send this rank signals after a step."""
    step, names = given

    def send() -> None:
        for name in names:
            signal.raise_signal(getattr(signal, name))

    _after(recipe, step, send)


def _once(name: str) -> Callable[[], object]:
    """Return a function that sends this rank a signal when it is called first."""
    left = [getattr(signal, name)]
    return lambda: left and signal.raise_signal(left.pop())


def signal_in_evaluation(recipe: Recipe, name: str) -> None:
    """Send this rank a signal in the midst of its first evaluation."""
    loss_fn, send = recipe.loss_fn, _once(name)

    def sending(model: Any, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            send()
        return loss_fn(model, batch)

    recipe.loss_fn = sending


def impatient(recipe: Recipe, patience_s: float) -> None:
    """Wait for data this long after a signal, instead of 20 seconds."""
    signals = fk.StopSignal
    fk.StopSignal = functools.partial(signals, patience_s=patience_s)


def store(recipe: Recipe, given: Mapping[str, Any]) -> None:
    """Change how a run works with a bucket: constants of ``forgekit.run``, by module and name."""
    for name, value in IMPATIENT.items():
        setattr(s3fs.S3FileSystem, name, value)
    for name, value in given.items():
        module, _, constant = name.partition(".")
        setattr(importlib.import_module(f"forgekit.run.{module}"), constant, value)


def _before_read(recipe: Recipe, act: Callable[[], object]) -> None:
    """Do something before each read of rows."""

    def watched(built: Any) -> Any:
        kind = type(built.loader.dataset)
        read = kind.__getitems__

        def reading(self: Any, rows: Any) -> Any:
            act()
            return read(self, rows)

        kind.__getitems__ = reading
        return built

    _change_setup(recipe, watched)


def signal_in_read(recipe: Recipe, given: tuple[int, str]) -> None:
    """Send this rank a signal while it reads the rows of a step, before they are there."""
    (step, name), now = given, _watch(recipe)
    send = _once(name)
    _before_read(recipe, lambda: now.step == step and send())


def stuck_read(recipe: Recipe, given: tuple[int, str]) -> None:
    """Let this rank wait for its so many-th read of rows for ever, once it has made a file."""
    (number, mark), reads = given, [0]

    def wait() -> None:
        reads[0] += 1
        if reads[0] >= number:
            Path(mark).touch()
            threading.Event().wait()

    _before_read(recipe, wait)


def limit_files(recipe: Recipe, given: tuple[int, int]) -> None:
    """After a step, and saves before it, let no file grow beyond so many bytes."""
    step, size = given

    def limit() -> None:
        wait_for_saves()
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    _after(recipe, step, limit)


def obey_modes(recipe: Recipe, given: None) -> None:
    """Give up the superuser's right to write where the mode of a folder forbids it."""
    system = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    if system.capget(header, sets) or not (sets[0] & _CAP_DAC_OVERRIDE):
        return
    for place in range(3):  # effective, permitted and inheritable
        sets[place] &= ~_CAP_DAC_OVERRIDE
    assert system.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def read_only_after(recipe: Recipe, given: tuple[int, str]) -> None:
    """Make a folder of the run read-only after a step and saves before it."""
    step, folder = given
    obey_modes(recipe, None)

    def close() -> None:
        wait_for_saves()
        Path(recipe.load_config(recipe.Config).out, folder).chmod(0o555)

    _after(recipe, step, close)
