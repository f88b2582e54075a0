"""One run directory in which things go wrong, beside a run that nobody disturbs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import pytest
from agents import RANK
from chaos.survival import Outcome
from runs import Job, arguments, assert_same_run, last_step, saved_step, status_of, tensors_of

import forgekit as fk

ROWS, SEQ_LEN, GLOBAL_BATCH = 40, 16, 8
"""Five steps are an epoch."""
SAVE_EVERY = 5
MOST_LOST = 2 * SAVE_EVERY
"""A save runs beside training, and the next one waits for it."""
STANDARD = {"steps": 30, "save_every": SAVE_EVERY, "batch_size": 2, "model__dropout": 0.1}
STANDARD |= {"global_batch_size": GLOBAL_BATCH}
STANDARD |= {"model__vocab_size": ROWS * SEQ_LEN + 2}  # even, for two ranks to share it


def counting_tokens(path: Path, rows: int = ROWS, *, end: int | None = None) -> Path:
    """A token file in which token ``t`` stands at place ``t``; ``end`` ends texts."""
    ids = np.arange(rows * SEQ_LEN)
    end = len(ids) if end is None else end
    fk.write_tokens(path, [ids], vocab_size=end + 1, eos_id=end)
    return path


def from_page(text: str, changes: Mapping[str, str]) -> str:
    """A command of a page, but for names and sizes."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


class Life(Job):
    """One start of a run, until it ends or is killed.

    Args:
        command_line: The recipe's arguments.
        log: File for what the ranks write.
        ranks: Number of ranks.
        faults: What goes wrong on which rank; see ``faults.py``.
        variables: Further variables of their environment.
    """

    def __init__(self, command_line, *, log, ranks, faults=None, variables=MappingProxyType({})):
        command = [str(RANK), "pretrain", *command_line]
        variables = {**variables, "FORGEKIT_TEST_FAULTS": json.dumps(faults or {})}
        super().__init__(command, log=log, forked=ranks, variables=variables)

    def end(self) -> list[int]:
        """Wait until no process is left; return the exit codes, negative for signals."""
        return self.codes()


@attrs.define
class Scene:
    """A place for lives of one run.

    Attributes:
        out: The run directory.
    """

    out: Path
    tokens: Path
    undisturbed: Callable[..., Path] | None = None
    lives: list[Life] = attrs.field(factory=list)

    def live(self, ranks: int = 2, faults: Any = None, **settings: Any) -> Life:
        """Start the run, or let it go on."""
        given = STANDARD | {"data__path": self.tokens, "out": self.out} | settings
        log = self.out.with_name(f"{self.out.name}-{len(self.lives)}.log")
        self.lives.append(Life(arguments(**given), log=log, ranks=ranks, faults=faults))
        return self.lives[-1]

    def go_on(self, ranks: int = 2, **settings: Any) -> int:
        """Let the run go on to its end, and compare it bit by bit with the undisturbed one.

        Returns:
            The step that it went on from.
        """
        life = self.live(ranks, **settings)
        assert life.end() == [0] * ranks, life.output
        assert status_of(self.out)["status"] == "finished"
        assert self.undisturbed is not None
        assert_same_run(self.out, self.undisturbed(ranks, **settings))
        return resumed_step(life)

    def survive(self, life: Life, *, lost: int, **settings: Any) -> Outcome:
        """Wait for the end of a life, look at what it left, and go on from there.

        Args:
            life: A life in which something goes wrong.
            lost: The most steps that it may cost.
            **settings: What the run has beside the standard settings.
        """
        codes = life.end()
        saved = check_checkpoints(self.out)
        reached, status = last_step(self.out), status_of(self.out)
        assert self.go_on(len(codes), **settings) == saved
        assert 0 <= reached - saved <= lost, (reached, saved, life.output)
        return Outcome(ended=describe(codes), status=status["status"], lost=lost)


def in_short(names: Iterable[str], *short: str) -> list[Any]:
    """Names as parameters of a test, of which only these are part of the default run."""
    mark = pytest.mark.chaos
    return [name if name in short else pytest.param(name, marks=mark) for name in names]


def describe(codes: list[int]) -> str:
    """Say how the ranks of a run ended."""
    said = ["killed" if code < 0 else f"exit {code}" for code in codes]
    if len(set(said)) == 1:
        return said[0]
    return ", ".join(f"rank {rank} {how}" for rank, how in enumerate(said))


def resumed_step(life: Life) -> int:
    """The step that a life went on from, as it says itself."""
    found = re.search(r": step (\d+), sample (\d+); ", life.output)
    assert found, life.output
    return int(found[1])


def check_checkpoints(out: Path) -> int:
    """Read all of the newest checkpoint, and see that ``latest`` is one.

    Returns:
        Its step, 0 if there is none. The files' own checks come with the life that goes on.
    """
    latest = out / "checkpoints" / "latest"
    if latest.is_symlink():
        assert (latest / "manifest.json").is_file()
    if step := saved_step(out):
        assert all(tensor.isfinite().all() for tensor in tensors_of(out).values())
    return step
