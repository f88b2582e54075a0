"""Comparison of a layout with one process in float64: gradients, loss, norm and three steps.

A wrong layout often still trains, only worse. So the layout's ranks are started here, on this
machine, and run the user's own set-up, loss and batches; one process does the same with plain
autograd and nothing of the step. In float64 both agree to about 1e-15. Where they do not,
each dimension of the mesh is tried alone, then pairs, to find the one that breaks.
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
from forgekit.verification.compare import Comparison
from forgekit.verification.local_ranks import LocalRankError, run_local_ranks
from forgekit.verification.measure import (
    RankJob,
    RankResult,
    Setup,
    data_rank,
    measure_layout,
    measure_plainly,
    world_of,
)
from forgekit.verification.result import SPLIT, VerifyCheck, VerifyReport

Progress = Callable[[str], None]
ONE_PROCESS = "one process"
RANKS_OF_A_CORE = 32


@attrs.frozen(kw_only=True)
class VerifyOptions:
    """Options of ``verify``."""

    split: bool
    tolerance: float
    timeout_s: float
    progress: Progress


def verify(
    build: Callable[[DeviceMesh], Any],
    layout: MeshSpec,
    *,
    split: bool = True,
    tolerance: float = 1e-8,
    timeout_s: float = 300,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare training in a layout with one process, in float64 on this machine's CPU.

    Each rank is a process that imports ``build``, so it is a function at the top level of a file;
    a script calls ``verify`` under ``if __name__ == "__main__":``. While ``build`` runs, torch's
    default dtype is float64; afterwards the model's parameters and buffers are float64, every
    dropout is 0, nothing is compiled, and plain SGD stands in for the optimizer. A part of each
    batch's ``labels [b s]`` is set to -100, another in each micro-batch: with equal numbers of
    targets some mistakes would not show. Nothing is trained or written.

    Args:
        build: Called with the mesh of a layout, on each of its ranks. Returns a record with
            ``state``, ``loss_fn`` and ``loader``, an iterable of this rank's micro-batches;
            ``micro_batches`` says how many make a step, 1 if it is missing.
        layout: The sizes of the mesh; -1 counts as 1.
        split: Whether the gradient must not depend on how the batch is split into micro-batches.
        tolerance: The largest relative error that counts as equal.
        timeout_s: Seconds after which ranks that do not finish are killed, for each run.
        progress: Called with a line for each run, before it starts.

    Returns:
        A report: every parameter's error, the loss, the norm, and the dimension that breaks.

    Raises:
        ValueError: If the layout cannot be, or this is a rank of a launcher already.
    """
    options = VerifyOptions(
        split=split,
        tolerance=tolerance,
        timeout_s=timeout_s,
        progress=progress or (lambda _: None),
    )
    return verify_setup(partial(_with_mesh, build), layout, options)


def _with_mesh(build: Callable[[DeviceMesh], Any], spec: MeshSpec) -> Any:
    return build(build_mesh(spec, device="cpu"))


def verify_setup(setup: Setup, layout: MeshSpec, options: VerifyOptions) -> VerifyReport:
    """Like ``verify``, for a set-up that builds its own mesh, as recipes do.

    Args:
        setup: Called with the layout's sizes, each above 0; calls ``build_mesh`` with them.
        layout: As for ``verify``.
        options: As for ``verify``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        world = os.environ["WORLD_SIZE"]
        raise ValueError(f"this is one of {world} ranks; run verify without torchrun.")
    # On the fewest ranks: -1 is 1.
    spec = MeshSpec(**{name: max(size, 1) for name, size in attrs.asdict(layout).items()})
    resolve_sizes(spec, world_of(spec))
    if world_of(spec) > (most := RANKS_OF_A_CORE * len(os.sched_getaffinity(0))):
        raise ValueError(
            f"the layout has {world_of(spec):,} ranks, each a process here, but these cores run at "
            f"most {most}. Verify it with smaller sizes of its dimensions."
        )
    with tempfile.TemporaryDirectory(prefix="forgekit-verify-") as folder:
        job = RankJob(setup=setup, spec=spec, folder=Path(folder))
        try:
            return _verify(job, options)
        except LocalRankError as error:
            name, tolerance = _name(spec), options.tolerance
            return VerifyReport(layout=name, failure=str(error), tolerance=tolerance)


def _verify(job: RankJob, options: VerifyOptions) -> VerifyReport:
    spec, began = job.spec, time.monotonic()
    options.progress(_line(spec))
    ranks = _run(job, options)  # first: its batches and weights are used by all others
    seconds = time.monotonic() - began
    job = attrs.evolve(job, start=_start(ranks), batches=_all_batches(ranks, spec))
    options.progress("one process, with plain autograd")
    began = time.monotonic()
    plain = attrs.evolve(job, spec=MeshSpec(dp_shard=1))
    (expected,) = run_local_ranks(
        measure_plainly, 1, plain, options.split, folder=job.folder, timeout_s=options.timeout_s
    )
    if not 0 < expected.norm < math.inf:
        raise LocalRankError(
            f"the gradient of the first step has norm {expected.norm} in one process, so there is "
            "nothing to compare. Do the batches have targets, and is the loss finite?"
        )
    comparison = Comparison(job.folder, job.start or {}, expected)
    notes = _notes(expected, job.start or {})
    report = comparison.report(_name(spec), ranks, options.tolerance, notes)
    first = {"name": _name(spec), "ranks": world_of(spec), "seconds": seconds}
    checks, broken = [VerifyCheck(**first, error=report.error)], ()
    if expected.merged is not None:
        seconds, error = time.monotonic() - began, comparison.merged_error(expected.merged)
        checks.append(VerifyCheck(name=SPLIT, ranks=1, seconds=seconds, error=error))
        # Written so that NaN counts as different.
        broken = () if error <= options.tolerance else (SPLIT,)
    # A gradient that depends on the split differs in every layout; bisecting is useless.
    if not broken and not report.error <= options.tolerance:
        further, broken = _bisect(job, options, comparison)
        checks += further
    return attrs.evolve(report, checks=tuple(checks), broken=broken)


def _run(job: RankJob, options: VerifyOptions) -> list[RankResult]:
    world, limit = world_of(job.spec), options.timeout_s
    return run_local_ranks(measure_layout, world, job, folder=job.folder, timeout_s=limit)


def _bisect(
    job: RankJob, options: VerifyOptions, comparison: Comparison
) -> tuple[list[VerifyCheck], tuple[str, ...]]:
    """Try no dimension, each alone, then larger sets; return the failing ones of the first size."""
    checks: dict[MeshSpec, VerifyCheck] = {}
    broken: list[str] = []
    dimensions = _dimensions(job.spec)
    for size in range(len(dimensions)):
        for names in itertools.combinations(dimensions, size):
            part = _only(job.spec, names)
            if part in checks or part == job.spec:
                continue
            checks[part] = _try(attrs.evolve(job, spec=part), options, comparison)
            if not checks[part].error <= options.tolerance:  # so that NaN counts
                broken += names or [ONE_PROCESS]
        if broken:
            return [*checks.values()], tuple(dict.fromkeys(broken))
    return [*checks.values()], dimensions or (ONE_PROCESS,)


def _try(job: RankJob, options: VerifyOptions, comparison: Comparison) -> VerifyCheck:
    options.progress(f"looking for what breaks: {_line(job.spec)}")
    began, name = time.monotonic(), _name(job.spec)
    error, failure = math.nan, None
    try:
        error = comparison.report(name, _run(job, options), options.tolerance).error
    except LocalRankError as raised:
        failure = str(raised)
    seconds, world = time.monotonic() - began, world_of(job.spec)
    return VerifyCheck(name=name, ranks=world, seconds=seconds, error=error, failure=failure)


def _dimensions(spec: MeshSpec) -> tuple[str, ...]:
    return tuple(name for name, size in attrs.asdict(spec).items() if size > 1)


def _name(spec: MeshSpec) -> str:
    return " ".join(f"{name}={getattr(spec, name)}" for name in _dimensions(spec)) or ONE_PROCESS


def _line(spec: MeshSpec) -> str:
    world = world_of(spec)
    return f"{_name(spec)} on {world} ranks" if world > 1 else "the step in one process"


def _only(spec: MeshSpec, names: tuple[str, ...]) -> MeshSpec:
    """Return a layout with some of its dimensions; experts keep the dimensions they view."""
    remaining = {*names, "dp_shard", "cp"} if "ep" in names else names
    sizes = {name: size if name in remaining else 1 for name, size in attrs.asdict(spec).items()}
    return MeshSpec(**sizes)


def _start(ranks: list[RankResult]) -> dict[str, str]:
    """Return each parameter's initial value, from the first rank that holds it."""
    return {name: digest for rank in reversed(ranks) for name, digest in rank.start.items()}


def _all_batches(ranks: list[RankResult], spec: MeshSpec) -> list[list[str]]:
    """Return each step's micro-batches over all data-parallel ranks."""
    readers = {data_rank(spec, number)[0]: rank.batches for number, rank in enumerate(ranks)}
    steps = zip(*(readers[data] for data in sorted(readers)), strict=True)
    # Micro-batch m of all ranks precedes micro-batch m + 1, in the order of samples.
    return [[digest for m in zip(*step, strict=True) for digest in m] for step in steps]


def _notes(expected: RankResult, start: dict[str, str]) -> Iterator[str]:
    others = [name for name, digest in expected.start.items() if start.get(name) != digest]
    if others:
        yield (
            f"setup gave {len(others)} parameters (first: {others[0]}) other initial values in one "
            "process; those of the layout were taken for both. fk.model.init_weights fills a model "
            "alike in every layout."
        )
    if expected.is_random:
        yield "the model or the loss draws random numbers, which differ between layouts."
