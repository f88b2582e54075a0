"""Compare a layout with one process in float64: each gradient, the loss, the norm and three steps.

A wrong layout often still trains, only worse. So the layout's ranks are started here, on this
machine, and run the user's own set-up, loss and batches; one process does the same with plain
autograd and nothing of the step. In float64 both agree to about 1e-15. Where they do not,
each dimension of the mesh is tried by itself, then pairs of them, to name the one that breaks.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from torch.distributed.device_mesh import DeviceMesh

from forgekit.mesh import MeshSpec, build_mesh, resolve_sizes
from forgekit.verification.gradient_errors import Comparison
from forgekit.verification.local_ranks import LocalRankError, run_local_ranks
from forgekit.verification.measure import (
    Found,
    Given,
    Setup,
    Task,
    Tensors,
    data_rank,
    measure_layout,
    measure_plainly,
    world_of,
)
from forgekit.verification.result import SPLIT, VerifyCheck, VerifyReport

Progress = Callable[[str], None]
ONE_PROCESS = "one process"
RANKS_OF_A_CORE = 32
RANK_BYTES = 2**28
"""What a rank takes of the memory beside its model, more or less."""


@attrs.frozen(kw_only=True)
class VerifyOptions:
    """The options of ``verify``; see there."""

    mask: bool = True
    split: bool = True
    tolerance: float = 1e-8
    timeout_s: float = 300
    progress: Progress | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance {self.tolerance} must be above 0 and below 1.")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s {self.timeout_s} must be finite and above 0.")


def verify(
    build: Callable[[DeviceMesh], Any],
    layout: MeshSpec,
    *,
    mask: bool = True,
    split: bool = True,
    tolerance: float = 1e-8,
    timeout_s: float = 300,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare what a model learns in a layout with one process, in float64 on this machine's CPU.

    Each rank is a process that imports ``build``, so it is a function at the top level of a file;
    a script calls ``verify`` under ``if __name__ == "__main__":``. While ``build`` runs, torch's
    default dtype is float64; afterwards the model's parameters and buffers are float64, every
    dropout is 0, nothing is compiled, and plain SGD stands in for the optimizer. Nothing is
    trained or written.

    Args:
        build: Called with the mesh of a layout, on each of its ranks. Returns a record with
            ``state``, ``loss_fn`` and ``loader``, an iterable of this rank's micro-batches;
            ``micro_batches`` says how many make a step, 1 if it is missing.
        layout: The sizes of the mesh; -1 counts as 1.
        mask: Whether a part of each batch's ``labels [b s]`` is set to -100, another in each
            micro-batch: with equal numbers of targets some mistakes would not show.
        split: Whether the gradient must not depend on how the batch is split into micro-batches.
        tolerance: The largest relative error that counts as equal.
        timeout_s: Seconds after which ranks that do not finish are killed, for each run.
        progress: Called with a line for each run, before it starts.

    Returns:
        A report: every parameter's error, the loss, the norm, and the dimension that breaks.

    Raises:
        ValueError: If the layout cannot be, ``build`` cannot be imported by other processes, or
            this is a rank of a launcher already.
    """
    options = VerifyOptions(
        mask=mask, split=split, tolerance=tolerance, timeout_s=timeout_s, progress=progress
    )
    return verify_setup(partial(_with_mesh, build), layout, options)


def _with_mesh(build: Callable[[DeviceMesh], Any], spec: MeshSpec) -> Any:
    return build(build_mesh(spec, device="cpu"))


def verify_setup(setup: Setup, layout: MeshSpec, options: VerifyOptions) -> VerifyReport:
    """As ``verify``, for a set-up that builds its mesh itself, as those of recipes do.

    Args:
        setup: Called with the layout's sizes, each above 0; calls ``build_mesh`` with them.
        layout: As for ``verify``.
        options: As for ``verify``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"this is one of {os.environ['WORLD_SIZE']} ranks; verify starts its ranks by itself, "
            "so start it as one process, without torchrun or srun."
        )
    # On as few ranks as the layout has: what is left over (-1) is 1.
    spec = MeshSpec(**{name: max(size, 1) for name, size in attrs.asdict(layout).items()})
    resolve_sizes(spec, world_of(spec))
    _check_machine(world_of(spec))
    with tempfile.TemporaryDirectory(prefix="forgekit-verify-") as folder:
        runs = _Runs(setup, Path(folder), options)
        try:
            return _verify(runs, spec)
        except LocalRankError as error:
            name, tolerance = _name(spec), options.tolerance
            return VerifyReport(layout=name, failure=str(error), tolerance=tolerance)


def _check_machine(world: int) -> None:
    """Refuse more ranks than this machine can run before the time is over."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(RANKS_OF_A_CORE * cores, max(memory // RANK_BYTES, 1))
    if world > most:
        raise ValueError(
            f"the layout has {world:,} ranks, each a process here, and {cores} cores with "
            f"{memory / 2**30:.1f} GiB run at most {most}. Verify it with smaller sizes of its "
            "dimensions."
        )


@attrs.frozen
class _Runs:
    """Starts the ranks of one layout after another."""

    setup: Setup
    folder: Path
    options: VerifyOptions

    def layout(self, spec: MeshSpec, given: Given | None = None) -> list[Found]:
        """What each rank of a layout finds."""
        return self._run(measure_layout, spec, given)

    def one_process(self, given: Given) -> Found:
        """What one process finds with plain autograd."""
        self.say("one process, with plain autograd")
        return self._run(measure_plainly, MeshSpec(dp_shard=1), given, self.options.split)[0]

    def say(self, line: str) -> None:
        """Report the progress, where it was asked for."""
        if self.options.progress is not None:
            self.options.progress(line)

    def _run(self, measure: Any, spec: MeshSpec, *args: Any) -> list[Any]:
        task = Task(setup=self.setup, spec=spec, folder=self.folder, mask=self.options.mask)
        limits: dict[str, Any] = {"folder": self.folder, "timeout_s": self.options.timeout_s}
        return run_local_ranks(measure, world_of(spec), task, *args, **limits)


def _verify(runs: _Runs, spec: MeshSpec) -> VerifyReport:
    tolerance, began = runs.options.tolerance, time.monotonic()
    runs.say(_line(spec))
    ranks = runs.layout(spec)  # first: its own batches and weights are what all others get
    seconds = time.monotonic() - began
    given = Given(start=_start(ranks), batches=_all_batches(ranks, spec))
    began = time.monotonic()
    expected = runs.one_process(given)
    if not 0 < expected.norm < math.inf:
        raise LocalRankError(
            f"the gradient of the first step has norm {expected.norm} in one process, so there is "
            "nothing to compare. Do the batches have targets, and is the loss finite?"
        )
    comparison = Comparison(Tensors(runs.folder), given.start, expected)
    report = VerifyReport(
        layout=_name(spec),
        rows=comparison.rows(ranks),
        loss=ranks[0].loss,
        loss_error=comparison.error_of("loss", ranks),
        norm=ranks[0].norm,
        norm_error=comparison.error_of("norm", ranks),
        notes=tuple(_notes(ranks, expected, given)),
        tolerance=tolerance,
    )
    checks, broken = [_check(spec, seconds, report.error)], ()
    if expected.merged is not None:
        seconds, error = time.monotonic() - began, comparison.merged_error(expected.merged)
        checks.append(VerifyCheck(name=SPLIT, dimensions=(), ranks=1, seconds=seconds, error=error))
        # Written so that NaN counts as different.
        broken = () if error <= tolerance else (SPLIT,)
    # A gradient that depends on the split differs in every layout; nothing more to learn then.
    if not broken and not report.error <= tolerance:
        further, broken = _bisect(runs, spec, given, comparison)
        checks += further
    return attrs.evolve(report, checks=tuple(checks), broken=broken)


def _bisect(
    runs: _Runs, spec: MeshSpec, given: Given, comparison: Comparison
) -> tuple[list[VerifyCheck], tuple[str, ...]]:
    """Try no dimension, each alone, then pairs and more; those of the first size that break."""
    checks: dict[str, VerifyCheck] = {}
    broken: list[str] = []
    dimensions = _dimensions(spec)
    for size in range(len(dimensions)):
        for names in itertools.combinations(dimensions, size):
            part = _only(spec, names)
            if _name(part) in checks or part == spec:
                continue
            check = checks[_name(part)] = _try(runs, part, given, comparison)
            if not check.error <= runs.options.tolerance:
                broken += names or [ONE_PROCESS]
        if broken:
            return [*checks.values()], tuple(dict.fromkeys(broken))
    return [*checks.values()], dimensions or (ONE_PROCESS,)


def _try(runs: _Runs, spec: MeshSpec, given: Given, comparison: Comparison) -> VerifyCheck:
    runs.say(f"looking for what breaks: {_line(spec)}")
    began, error, failure = time.monotonic(), math.nan, None
    try:
        error = comparison.error(runs.layout(spec, given))
    except LocalRankError as raised:
        failure = str(raised)
    return _check(spec, time.monotonic() - began, error, failure)


def _check(spec: MeshSpec, seconds: float, error: float, failure: str | None = None) -> VerifyCheck:
    return VerifyCheck(
        name=_name(spec),
        dimensions=_dimensions(spec),
        ranks=world_of(spec),
        seconds=seconds,
        error=error,
        failure=failure,
    )


def _dimensions(spec: MeshSpec) -> tuple[str, ...]:
    return tuple(name for name, size in attrs.asdict(spec).items() if size > 1)


def _name(spec: MeshSpec) -> str:
    return " ".join(f"{name}={getattr(spec, name)}" for name in _dimensions(spec)) or ONE_PROCESS


def _line(spec: MeshSpec) -> str:
    world = world_of(spec)
    return f"{_name(spec)} on {world} ranks" if world > 1 else "the step in one process"


def _only(spec: MeshSpec, names: tuple[str, ...]) -> MeshSpec:
    """A layout with some of its dimensions; experts keep those that they are a view of."""
    kept = {*names, "dp_shard", "cp"} if "ep" in names else names
    sizes = {name: size if name in kept else 1 for name, size in attrs.asdict(spec).items()}
    return MeshSpec(**sizes)


def _start(ranks: list[Found]) -> dict[str, str]:
    """Each parameter's initial value as the lowest rank has it that holds it."""
    return {name: digest for rank in reversed(ranks) for name, digest in rank.start.items()}


def _all_batches(ranks: list[Found], spec: MeshSpec) -> list[list[str]]:
    """The micro-batches of each step over all data-parallel ranks."""
    readers = {data_rank(spec, rank)[0]: found.batches for rank, found in enumerate(ranks)}
    steps = zip(*(readers[data] for data in sorted(readers)), strict=True)
    # Micro-batch m of all ranks comes before micro-batch m + 1, as in the order of samples.
    return [[digest for m in zip(*step, strict=True) for digest in m] for step in steps]


def _notes(ranks: list[Found], expected: Found, given: Given) -> Iterator[str]:
    others = [name for name, digest in expected.start.items() if given.start.get(name) != digest]
    copies = [n for rank in ranks for n, digest in rank.start.items() if given.start[n] != digest]
    if copies:
        yield f"ranks began with different values of {_some(copies)}."
    if others:
        yield (
            f"setup gave {_some(others)} other initial values in one process; those of the layout "
            "were taken for both. fk.init_weights fills a model alike in every layout."
        )
    if expected.is_random:
        yield "the model or the loss draws random numbers, which differ between layouts."


def _some(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{len(names)} parameters (first: {names[0]})"
