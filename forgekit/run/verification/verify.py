"""Compare a layout with one process in float64: each gradient, the loss, the norm and three steps.

A layout that is laid out wrongly often trains, only worse. So the layout's ranks are started here,
on this machine, and run the user's own set-up, loss and batches; one process does the same with
plain autograd and nothing of the step. In float64 both agree to about 1e-15. Where they do not,
each dimension of the mesh is tried by itself, then pairs of them, to name the one that breaks.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh

from forgekit.mesh import DIMENSIONS, MeshSpec, build_mesh, resolve_sizes
from forgekit.run.verification.compare import (
    Found,
    Given,
    Setup,
    Task,
    Tensors,
    data_rank,
    measure_layout,
    measure_plainly,
)
from forgekit.run.verification.local_ranks import LocalRankError, run_local_ranks

__all__ = ["VerifyCheck", "VerifyReport", "VerifyRow", "verify", "verify_setup"]

SPLIT = "micro-batches"
SMALLEST = 1e-6
"""Of the model's largest gradient: a parameter with smaller ones is compared with this much."""


@attrs.frozen(kw_only=True)
class VerifyRow:
    """One parameter.

    Attributes:
        name: Its name.
        error: Largest difference of its gradient over its largest gradient (over a millionth of
            the model's, if that is more).
        of_model: The same difference over the model's largest gradient.
        moved: Largest difference after three SGD steps over what they moved the model at most.
        norm: L2 norm of its gradient in one process.
    """

    name: str
    error: float
    of_model: float
    moved: float
    norm: float

    @property
    def worst(self) -> float:
        """The larger of ``error`` and ``moved``; NaN if one is."""
        return _largest([self.error, self.moved])


@attrs.frozen(kw_only=True)
class VerifyCheck:
    """One run that was compared with one process.

    Attributes:
        name: Such as ``"tp=2 pp=2"``, ``"one process"`` or ``"micro-batches"``.
        dimensions: Names of the mesh dimensions above 1.
        ranks: Number of ranks.
        seconds: How long it took.
        error: The worst relative error; NaN if it failed.
        failure: What a rank raised or where it hangs, or None.
    """

    name: str
    dimensions: tuple[str, ...]
    ranks: int
    seconds: float
    error: float
    failure: str | None = None


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What ``verify`` found; ``str`` is the table with its verdict.

    Attributes:
        layout: Such as ``"tp=2 pp=2"``.
        rows: Every parameter of the layout, the worst first; empty if it failed.
        loss: Token-mean loss of the first step in the layout.
        loss_error: Its relative error.
        norm: Norm of its gradient.
        norm_error: Its relative error.
        checks: Every run, in order.
        broken: The dimensions that break, ``("micro-batches",)``, ``("one process",)``, or none.
        failure: What a rank of the layout raised or where it hangs, or None.
        notes: What else was seen.
        tolerance: The largest error that counts as equal.
    """

    layout: str
    rows: tuple[VerifyRow, ...] = ()
    loss: float = math.nan
    loss_error: float = math.nan
    norm: float = math.nan
    norm_error: float = math.nan
    checks: tuple[VerifyCheck, ...] = ()
    broken: tuple[str, ...] = ()
    failure: str | None = None
    notes: tuple[str, ...] = ()
    tolerance: float

    @property
    def error(self) -> float:
        """The worst relative error of the layout; NaN if there is one, or nothing to compare."""
        errors = [row.worst for row in self.rows]
        return _largest([*errors, self.loss_error, self.norm_error])

    @property
    def equal(self) -> bool:
        """Whether everything agrees."""
        checks = [check.error <= self.tolerance for check in self.checks]
        return self.failure is None and all(checks) and self.error <= self.tolerance

    def __str__(self) -> str:
        """The table, worst first, the lines of each run, and the verdict."""
        from forgekit.run.verification.result_text import show_report

        return show_report(self)


Progress = Callable[[str], None]


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
        timeout_s: Seconds until ranks that do not finish are given up, for each run.
        progress: Called with a line for each run, before it starts.

    Returns:
        A report: every parameter's error, the loss, the norm, and the dimension that breaks.

    Raises:
        ValueError: If the layout cannot be, ``build`` cannot be imported by other processes, or
            this is a rank of a launcher already.
    """
    return verify_setup(
        partial(_with_mesh, build),
        layout,
        mask=mask,
        split=split,
        tolerance=tolerance,
        timeout_s=timeout_s,
        progress=progress,
    )


def _with_mesh(build: Callable[[DeviceMesh], Any], spec: MeshSpec) -> Any:
    return build(build_mesh(spec, device="cpu"))


def verify_setup(
    setup: Setup,
    layout: MeshSpec,
    *,
    mask: bool = True,
    split: bool = True,
    tolerance: float = 1e-8,
    timeout_s: float = 300,
    progress: Progress | None = None,
) -> VerifyReport:
    """As ``verify``, for a set-up that builds its mesh itself, as those of recipes do.

    Args:
        setup: Called with the layout's sizes, each above 0; calls ``build_mesh`` with them.
        layout: See ``verify``.
        mask: See ``verify``.
        split: See ``verify``.
        tolerance: See ``verify``.
        timeout_s: See ``verify``.
        progress: See ``verify``.

    Returns:
        A report.

    Raises:
        ValueError: As ``verify``.
    """
    _check_arguments(tolerance, timeout_s)
    spec = _whole(layout)
    with tempfile.TemporaryDirectory(prefix="forgekit-verify-") as folder:
        runs = _Runs(setup, Path(folder), mask, timeout_s, progress or _silent)
        try:
            return _verify(runs, spec, split=split, tolerance=tolerance)
        except LocalRankError as error:
            return VerifyReport(layout=_name(spec), failure=str(error), tolerance=tolerance)


def _check_arguments(tolerance: float, timeout_s: float) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}; it is a relative error between 0 and 1.")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s is {timeout_s}; it is a number of seconds above 0.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"this is one of {os.environ['WORLD_SIZE']} ranks; verify starts its ranks by itself, "
            "so start it as one process, without torchrun or srun."
        )


def _whole(layout: MeshSpec) -> MeshSpec:
    """The layout on as few ranks as it has: what is left over is 1."""
    sizes = {name: max(size, 1) for name, size in attrs.asdict(layout).items()}
    spec = MeshSpec(**sizes)
    resolve_sizes(spec, _world(spec))
    return spec


def _world(spec: MeshSpec) -> int:
    return math.prod(getattr(spec, name) for name in DIMENSIONS)


def _name(spec: MeshSpec) -> str:
    sizes = {name: size for name, size in attrs.asdict(spec).items() if size > 1}
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "one process"


@attrs.frozen
class _Runs:
    """Starts the ranks of one layout after another."""

    setup: Setup
    folder: Path
    mask: bool
    timeout_s: float
    progress: Progress

    def layout(self, spec: MeshSpec, given: Given | None = None) -> list[Found]:
        """What each rank of a layout finds."""
        return self._run(measure_layout, spec, given)

    def reference(self, given: Given, merge: bool) -> Found:
        """What one process finds with plain autograd."""
        self.progress("one process, with plain autograd")
        return self._run(partial(measure_plainly, merge=merge), MeshSpec(dp_shard=1), given)[0]

    def _run(self, measure: Any, spec: MeshSpec, given: Given | None) -> list[Any]:
        task = Task(setup=self.setup, spec=spec, folder=self.folder, given=given, mask=self.mask)
        return run_local_ranks(
            measure, _world(spec), task, folder=self.folder, timeout_s=self.timeout_s
        )


def _verify(runs: _Runs, spec: MeshSpec, *, split: bool, tolerance: float) -> VerifyReport:
    began = time.monotonic()
    runs.progress(_line(spec))
    ranks = runs.layout(spec)
    seconds = time.monotonic() - began
    given = Given(start=_first_of_each(ranks), batches=_union(ranks, spec))
    began = time.monotonic()
    expected = runs.reference(given, split)
    if not 0 < expected.norm < math.inf:
        raise LocalRankError(
            f"the gradient of the first step has norm {expected.norm} in one process, so there is "
            "nothing to compare. Do the batches have targets, and is the loss finite?"
        )
    compare = _Comparison(Tensors(runs.folder), given.start, expected)
    rows = compare.rows(ranks)
    report = VerifyReport(
        layout=_name(spec),
        rows=rows,
        loss=ranks[0].loss,
        loss_error=_relative([rank.loss for rank in ranks], expected.loss),
        norm=ranks[0].norm,
        norm_error=_relative([rank.norm for rank in ranks], expected.norm),
        notes=tuple(_notes(ranks, expected, given)),
        tolerance=tolerance,
    )
    checks = [_check(spec, seconds, report.error)]
    if expected.merged is not None:
        seconds, error = time.monotonic() - began, compare.merged()
        checks.append(VerifyCheck(name=SPLIT, dimensions=(), ranks=1, seconds=seconds, error=error))
        if not error <= tolerance:
            return attrs.evolve(report, checks=tuple(checks), broken=(SPLIT,))
    if report.error <= tolerance:
        return attrs.evolve(report, checks=tuple(checks))
    further, broken = _bisect(runs, spec, given, compare, tolerance)
    return attrs.evolve(report, checks=(*checks, *further), broken=broken)


def _line(spec: MeshSpec) -> str:
    world = _world(spec)
    return f"{_name(spec)} on {world} ranks" if world > 1 else "the step in one process"


def _check(spec: MeshSpec, seconds: float, error: float, failure: str | None = None) -> VerifyCheck:
    return VerifyCheck(
        name=_name(spec),
        dimensions=_dimensions(spec),
        ranks=_world(spec),
        seconds=seconds,
        error=error,
        failure=failure,
    )


def _dimensions(spec: MeshSpec) -> tuple[str, ...]:
    return tuple(name for name, size in attrs.asdict(spec).items() if size > 1)


def _silent(_line: str) -> None:
    pass


def _bisect(
    runs: _Runs, spec: MeshSpec, given: Given, compare: _Comparison, tolerance: float
) -> tuple[list[VerifyCheck], tuple[str, ...]]:
    """Try no dimension, each alone, then pairs and more; those of the first size that break."""
    checks: list[VerifyCheck] = []
    broken: list[str] = []
    dimensions = _dimensions(spec)
    for size in range(len(dimensions)):
        for names in itertools.combinations(dimensions, size):
            part = _only(spec, names)
            if _name(part) in {check.name for check in checks} or part == spec:
                continue
            checks.append(_try(runs, part, given, compare))
            if not checks[-1].error <= tolerance:
                broken += [*names] if names else ["one process"]
        if broken:
            return checks, tuple(dict.fromkeys(broken))
    return checks, dimensions or ("one process",)


def _only(spec: MeshSpec, names: tuple[str, ...]) -> MeshSpec:
    """A layout with some of its dimensions; experts keep those that they are a view of."""
    kept = {*names, "dp_shard", "cp"} if "ep" in names else names
    sizes = {name: size if name in kept else 1 for name, size in attrs.asdict(spec).items()}
    return MeshSpec(**sizes)


def _try(runs: _Runs, spec: MeshSpec, given: Given, compare: _Comparison) -> VerifyCheck:
    runs.progress(f"looking for what breaks: {_line(spec)}")
    began = time.monotonic()
    try:
        ranks = runs.layout(spec, given)
    except LocalRankError as error:
        return _check(spec, time.monotonic() - began, math.nan, str(error))
    errors = [row.worst for row in compare.rows(ranks)]
    errors.append(_relative([rank.loss for rank in ranks], compare.expected.loss))
    errors.append(_relative([rank.norm for rank in ranks], compare.expected.norm))
    return _check(spec, time.monotonic() - began, _largest(errors))


def _first_of_each(ranks: list[Found]) -> dict[str, str]:
    """Each parameter's initial value as the lowest rank has it that holds it."""
    return {name: digest for rank in reversed(ranks) for name, digest in rank.start.items()}


def _union(ranks: list[Found], spec: MeshSpec) -> list[list[str]]:
    """The micro-batches of each step over all data-parallel ranks."""
    readers: dict[int, int] = {}
    for rank in range(len(ranks)):
        readers.setdefault(data_rank(spec, rank)[0], rank)
    by_data = [ranks[readers[data]].batches for data in sorted(readers)]
    return [
        [digest for together in zip(*step, strict=True) for digest in together]
        for step in zip(*by_data, strict=True)
    ]


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


@attrs.frozen
class _Comparison:
    """Differences from what one process has found."""

    kept: Tensors
    start: Mapping[str, str]
    expected: Found

    def rows(self, ranks: list[Found]) -> tuple[VerifyRow, ...]:
        """Every parameter's errors over all ranks, the worst first."""
        largest = max(map(self._largest, self.expected.gradients.values()), default=0.0)
        longest = max(map(self._move, self.expected.gradients), default=0.0)
        held = (name for rank in ranks for name in rank.gradients)
        names = dict.fromkeys((*self.expected.gradients, *held))
        rows = [self._row(name, ranks, largest, longest) for name in names]
        return tuple(sorted(rows, key=lambda row: (row.worst == row.worst, -row.worst)))

    def merged(self) -> float:
        """The worst error of the gradients with micro-batches joined."""
        expected = self.expected.gradients
        largest = max(map(self._largest, expected.values()), default=0.0)
        merged: Any = self.expected.merged
        return _largest(
            self._difference({merged[name]}, digest) / self._scale(name, largest)
            for name, digest in expected.items()
        )

    def _row(self, name: str, ranks: list[Found], largest: float, longest: float) -> VerifyRow:
        gradients = {rank.gradients[name] for rank in ranks if name in rank.gradients}
        after = {rank.after[name] for rank in ranks if name in rank.after}
        expected = self.expected.gradients.get(name)
        if expected is None or not gradients:  # one of the two does not have it
            return VerifyRow(name=name, error=math.inf, of_model=math.inf, moved=math.inf, norm=0.0)
        difference = self._difference(gradients, expected)
        return VerifyRow(
            name=name,
            error=_ratio(difference, self._scale(name, largest)),
            of_model=_ratio(difference, largest),
            moved=_ratio(self._difference(after, self.expected.after[name]), longest),
            norm=float(self.kept.load(expected).norm()),
        )

    def _scale(self, name: str, largest: float) -> float:
        return max(self._largest(self.expected.gradients[name]), SMALLEST * largest)

    def _largest(self, digest: str) -> float:
        return float(self.kept.load(digest).abs().max())

    def _move(self, name: str) -> float:
        return self._difference({self.expected.after[name]}, self.start[name])

    def _difference(self, found: set[str], expected: str) -> float:
        tensor = self.kept.load(expected)
        others = [digest for digest in found if digest != expected]
        return _largest([0.0, *(_distance(self.kept.load(digest), tensor) for digest in others)])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else math.inf


def _ratio(difference: float, scale: float) -> float:
    """A relative error; where there is nothing to compare with, any difference is infinite."""
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def _relative(values: list[float], expected: float) -> float:
    return _largest(_ratio(abs(value - expected), abs(expected)) for value in values)


def _largest(values: Any) -> float:
    """The largest number; NaN if there is one, or none at all."""
    values = list(values)
    if not values or any(value != value for value in values):
        return math.nan
    return max(values)
