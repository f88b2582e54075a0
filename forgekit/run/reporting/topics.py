"""Which charts a page has: by what was logged, in the order in which to read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from forgekit.run.reporting.curves import (
    FEW,
    Chart,
    Curve,
    Mark,
    by_number,
    evenly,
    half_window,
    smoothed,
    trend,
)
from forgekit.run.reporting.run_data import RunData

MOST_CURVES = 8
"""Names in one chart; what more there are is named below it."""

MOST_OTHERS = 24
"""Charts of metrics that no topic knows."""

MOST_MARKS = 200


@attrs.frozen
class Topic:
    """A chart of all metrics whose name matches a pattern.

    Attributes:
        section: Heading that the chart stands under.
        key: Of the chart.
        title: Of the chart.
        unit: Of its values.
        pattern: Regular expression of whole names; its group, if it has one, is the label.
        caption: What one sees.
        is_noisy: Whether a trend is drawn over the rows.
        is_log: As for ``Chart``.
        from_zero: As for ``Chart``.
        has_marks: Whether bad steps are shown too.
    """

    section: str
    key: str
    title: str
    unit: str
    pattern: str
    caption: str = ""
    is_noisy: bool = False
    is_log: bool = False
    from_zero: bool = False
    has_marks: bool = False


TOPICS = (
    Topic("Training", "lr", "Learning rate", "of the schedule", "train/lr", from_zero=True),
    Topic(
        *("Training", "grad_norm", "Gradient norm", "L2, before clipping", "train/grad_norm"),
        is_noisy=True,
        is_log=True,
        has_marks=True,
    ),
    Topic(
        *("Training", "layer_norm", "Gradient norm by layer", "L2, before clipping"),
        pattern="grad_norm/(.+)",
        is_noisy=True,
        is_log=True,
    ),
    Topic(
        *("Training", "evaluation", "Evaluation", "loss, nats per target", "eval/(.+)/loss"),
        caption="Lower is better.",
    ),
    Topic(
        *("Training", "evaluation_bits", "Evaluation: bits per byte", "bits per byte of text"),
        pattern="eval/(.+)/bits_per_byte",
        caption="Lower is better.",
    ),
    Topic(
        *("Training", "evaluation_perplexity", "Evaluation: perplexity", "exp(loss)"),
        pattern="eval/(.+)/perplexity",
        caption="Lower is better.",
        is_log=True,
    ),
    Topic("Training", "evaluation_other", "Evaluation: the rest", "value", "eval/(.+)"),
    Topic(
        *("Speed", "throughput", "Throughput", "targets per second", "perf/tokens_per_second"),
        caption="Without evaluations and saves between two rows.",
        is_noisy=True,
        from_zero=True,
    ),
    Topic(
        *("Speed", "times", "Step time and wait for data", "seconds per step"),
        pattern="perf/(step|data_wait)_seconds",
        caption="A wait near the step time: the data are too slow.",
        is_noisy=True,
        is_log=True,
    ),
    Topic(
        *("Speed", "rank_times", "Times over ranks", "seconds per step"),
        pattern="perf/(.+_seconds_(?:min|mean|max))",
        caption="Least, mean and most: far apart, one rank is slow.",
        is_noisy=True,
        is_log=True,
    ),
    Topic("Speed", "mfu", "Model FLOP utilisation", "share of the peak", "perf/(mfu.*)"),
    Topic("Speed", "memory", "Memory", "GiB", "memory/(.+?)(?:_gib)?", from_zero=True),
    Topic(
        *("Sources", "source_loss", "Loss by source", "nats per target", "source/(.+)/loss"),
        is_noisy=True,
    ),
    Topic(
        *("Experts", "expert_load", "Load of experts", "times the mean", "moe/(load_max|load_min)"),
        caption="The busiest and the idlest expert of any layer; 1 is even.",
        is_noisy=True,
        from_zero=True,
    ),
    Topic(
        *("Experts", "expert_dropped", "Tokens dropped", "share of choices", "moe/dropped"),
        from_zero=True,
    ),
    Topic("Experts", "expert_other", "Routers", "value", "moe/([^/]+)", is_noisy=True, is_log=True),
)
HIDDEN = re.compile(
    r"step|samples|train/(loss_mean|targets|skipped|skipped_in_a_row|spikes)|.+/targets"
)
"""What the page has in another form."""


def build_charts(runs: Sequence[RunData]) -> list[tuple[str, Chart]]:
    """Make the charts of all runs, each with the section that it stands in."""
    names = sorted({name for run in runs for name in run.metrics.numbers}, key=by_number)
    names = [name for name in names if not HIDDEN.fullmatch(name) and _is_drawn(runs, name)]
    names = [name for name in names if not _is_repeated(name, names, alone=len(runs) == 1)]
    charts = [("Training", chart) for chart in _loss_charts(runs)]
    used = {"train/loss"}
    for topic in TOPICS:
        found = {n: m for n in names if n not in used and (m := re.fullmatch(topic.pattern, n))}
        used |= found.keys()
        labels = {name: (m[1] if m.re.groups else topic.title) for name, m in found.items()}
        charts += [(topic.section, chart) for chart in _charts(runs, topic, labels)]
        if topic.key == "source_loss":
            charts += [("Sources", chart) for chart in _share_charts(runs)]
    others = [name for name in names if name not in used]
    for name in others[:MOST_OTHERS]:
        topic = Topic("Other metrics", re.sub(r"\W+", "_", name), name, "value", "", is_noisy=True)
        charts += [(topic.section, chart) for chart in _charts(runs, topic, {name: name})]
    if left := others[MOST_OTHERS:]:
        section, last = charts[-1]
        charts[-1] = section, attrs.evolve(last, caption=f"Not drawn: {', '.join(left[:50])}.")
    return charts


def marks_of(run: RunData) -> list[Mark]:
    """The steps at which something happened: phases, starts after the first one, bad steps."""
    marks = [Mark(step, "bad") for step in sorted(bad_steps(run))]
    known = [event for event in run.history if isinstance(event.get("step"), int)]
    starts = [event["step"] for event in known if event.get("event") == "started"]
    marks += [Mark(step, "start", "started again") for step in starts[1:] if step > 0]
    ways_back = [event["step"] for event in known if event.get("event") == "rolled_back"]
    marks += [Mark(step, "start", "rolled back to here") for step in ways_back]
    return marks[-MOST_MARKS:] + list(_phases(run))


def bad_steps(run: RunData) -> set[int]:
    """The bad steps: those in ``bad_steps.jsonl``, and rows that count some."""
    steps, skipped = run.metrics.column("train/skipped")
    listed = {bad["step"] for bad in run.bad_steps if isinstance(bad.get("step"), int)}
    return listed if listed else set(steps[skipped > 0].tolist())


def _phases(run: RunData) -> Iterator[Mark]:
    """The phases of the configuration; one begins at a step, or at a sample."""
    phases = run.setting("phases", [])
    for number, phase in enumerate(phases if isinstance(phases, list) else [], start=1):
        if not isinstance(phase, dict):
            continue
        step = phase.get("step", run.steps_of(phase["start"]) if "start" in phase else None)
        if isinstance(step, int | float) and math.isfinite(step):
            yield Mark(float(step), "phase", f"phase {number}")


def _is_repeated(name: str, names: Sequence[str], *, alone: bool) -> bool:
    """Whether another chart has the same curve: bits per byte are a multiple of the loss.

    One run's losses are in the chart of its training loss too.
    """
    what, _, metric = name.rpartition("/")
    better = {"perplexity": "loss", "loss": "bits_per_byte" if alone else ""}.get(metric, "")
    return name.startswith("eval/") and f"{what}/{better}" in names


def _is_drawn(runs: Sequence[RunData], name: str) -> bool:
    return any(np.isfinite(run.metrics.column(name)[1]).any() for run in runs)


def _loss_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The loss of training, and for one run the evaluations and all that happened."""
    alone = runs[0] if len(runs) == 1 else None
    curves = [
        curve
        for number, run in enumerate(runs)
        for curve in _noisy(run, "train/loss", "train" if alone else run.label, number, len(runs))
    ]
    marks: list[Mark] = []
    if alone is not None:
        marks = marks_of(alone)
        names = sorted(n for n in alone.metrics.numbers if re.fullmatch("eval/.+/loss", n))
        for number, name in enumerate(names[:MOST_CURVES], start=1):
            steps, values = alone.metrics.column(name)
            label = name.removesuffix("/loss")
            curves.append(Curve(label, number, _kind(steps), steps, values))
    curves = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not curves:
        return []
    caption = _window_caption(runs, "train/loss")
    if any(mark.kind == "bad" for mark in marks):
        caption += " Red ticks: bad steps, which changed nothing."
    chart = Chart("loss", "Loss", "nats per target", curves, marks, caption, is_wide=True)
    return [chart]


def _charts(runs: Sequence[RunData], topic: Topic, labels: dict[str, str]) -> Iterator[Chart]:
    """One chart of all names for one run; for several runs one chart for each name."""
    if not labels:
        return
    shown = evenly(list(labels), MOST_CURVES)
    caption = " ".join(filter(None, [topic.caption, _caption(runs, topic, shown)]))
    left = [label for name, label in labels.items() if name not in shown]
    not_drawn = f" Not drawn: {', '.join(left[:50])}." if left else ""
    chart = Chart(topic.key, topic.title, topic.unit, (), (), caption)
    chart = attrs.evolve(chart, is_log=topic.is_log, from_zero=topic.from_zero)
    if len(runs) == 1:
        marks = [m for m in marks_of(runs[0]) if topic.has_marks or m.kind != "bad"]
        curves = [
            curve
            for number, name in enumerate(shown)
            for curve in _curves(
                runs[0], topic, name, labels[name] if len(labels) > 1 else "", number, len(shown)
            )
        ]
        yield attrs.evolve(chart, curves=curves, marks=marks, caption=caption + not_drawn)
        return
    for name in shown:
        curves = [
            curve
            for number, run in enumerate(runs)
            for curve in _curves(run, topic, name, run.label, number, len(runs))
        ]
        key, title = topic.key, topic.title
        if len(labels) > 1:
            key = f"{key}_{re.sub(r'[^A-Za-z0-9]+', '_', labels[name])}"
            title = f"{title}: {labels[name]}"
        said = caption + not_drawn * (name == shown[-1])
        yield attrs.evolve(chart, key=key, title=title, curves=curves, caption=said)


def _curves(
    run: RunData, topic: Topic, name: str, label: str, color: int, among: int
) -> Iterator[Curve]:
    steps, values = run.metrics.column(name)
    if not np.isfinite(values).any():
        return
    if topic.is_noisy:
        yield from _noisy(run, name, label, color, among)
    else:
        yield Curve(label, color, _kind(steps), steps, values)


def _kind(steps: np.ndarray) -> str:
    return "points" if len(steps) <= 3 * FEW else "line"


def _noisy(run: RunData, name: str, label: str, color: int, among: int) -> Iterator[Curve]:
    """Each row, pale, and their trend; of many curves the trend alone."""
    steps, values = run.metrics.column(name)
    if not np.isfinite(values).any():
        return
    if len(steps) < FEW:
        yield Curve(label, color, "points", steps, values)
        return
    if among <= 4:
        yield Curve("", color, "raw", steps, values)
    yield Curve(label, color, "trend", *trend(steps, values, half_window(len(steps))))


def _caption(runs: Sequence[RunData], topic: Topic, names: Sequence[str]) -> str:
    return _window_caption(runs, names[0]) if topic.is_noisy else ""


def _window_caption(runs: Sequence[RunData], name: str) -> str:
    rows = max(len(run.metrics.column(name)[0]) for run in runs)
    if rows < FEW:
        return "Each logged row."
    return f"Pale: each logged row. Thick: median of {2 * half_window(rows) + 1} rows."


def _share_charts(runs: Sequence[RunData]) -> Iterator[Chart]:
    """What share of the targets each source had."""
    topic = Topic("Sources", "source_share", "Share of sources", "share of targets", "")
    for number, run in enumerate(runs):
        names = sorted(n for n in run.metrics.numbers if re.fullmatch("source/.+/targets", n))
        found = [run.metrics.column(name) for name in names]
        if not found or any(len(steps) != len(found[0][0]) for steps, _ in found):
            continue
        total = np.maximum(np.nansum([values for _, values in found], axis=0), 1)
        half = half_window(len(total))
        curves = [
            Curve(name.split("/", 1)[1].removesuffix("/targets"), color, "line", steps, share)
            for color, (name, (steps, values)) in enumerate(zip(names, found, strict=True))
            if color < MOST_CURVES and len(share := smoothed(values / total, half))
        ]
        alone = len(runs) == 1
        yield Chart(
            topic.key if alone else f"{topic.key}_{number + 1}",
            topic.title if alone else f"{topic.title}: {run.label}",
            topic.unit,
            curves,
            [mark for mark in marks_of(run) if mark.kind == "phase"],
            f"Mean over {2 * half + 1} rows.",
            from_zero=True,
        )
