"""A report as one HTML page that loads nothing: style, lines and script are inside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from importlib.resources import files
from typing import Any

import attrs

from forgekit.run.reporting.chart_svg import chart_html, words
from forgekit.run.reporting.curves import Chart, short, step_axis
from forgekit.run.reporting.diagrams import attention_mask, expert_maps, pipeline_timeline
from forgekit.run.reporting.headline import headline
from forgekit.run.reporting.run_data import RunData

EVENTS = 50
"""The newest events, and bad steps, that are listed."""

BAD_STEP = ("step", "spike", "loss", "grad_norm", "samples", "sources", "rows")
"""What the page shows of a bad step's record."""

NAMED = 6
"""Metrics of a note that are named."""

LONGEST_VALUE = 300
"""Characters of a value of the configuration."""

NO_NETWORK = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
"""Even a browser that finds an address in the page loads nothing."""


def build_page(
    runs: Sequence[RunData], charts: Sequence[tuple[str, Chart]], *, refresh_s: float | None = None
) -> str:
    """Write the page of one run, or of several over each other.

    Args:
        runs: What to show.
        charts: Sections and charts, as of ``build_charts``.
        refresh_s: Seconds after which a browser loads the page again; None for never.

    Returns:
        The HTML.
    """
    steps = step_axis([chart for _, chart in charts])
    sections: dict[str, list[str]] = {}
    for section, chart in charts:
        sections.setdefault(section, []).append(chart_html(_tagged(chart, runs), steps))
    for run in runs:
        for section, drawn in _diagrams(run).items():
            sections.setdefault(section, []).extend(_named(run, runs, drawn))
    bodies = {name: f'<div class="grid">{"".join(parts)}</div>' for name, parts in sections.items()}
    bodies |= {"Samples": _samples(runs), "What happened": _events(runs)}
    bodies["Configuration"] = _configuration(runs)
    bodies = {name: body for name, body in bodies.items() if body}
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].label
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{NO_NETWORK}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="refresh" content="{refresh_s:g}">' if refresh_s else "",
            f"<title>{words(title)}</title><style>{_part('page.css')}</style></head>\n<body>",
            f"<header><h1>{words(title)}</h1><p>{_made(runs, refresh_s)}</p></header>\n",
            _headline(runs),
            *(f'<p class="note">{words(note)}</p>' for run in runs for note in _notes(run)),
            f"<nav>{''.join(_link(name) for name in bodies)}</nav>\n",
            *(f'<h2 id="{_id(name)}">{name}</h2>\n{body}\n' for name, body in bodies.items()),
            f"<script>{_part('page.js')}</script></body></html>\n",
        ]
    )


def _tagged(chart: Chart, runs: Sequence[RunData]) -> Chart:
    """A chart whose curves have the tags of runs; a wide one has room for their names too."""
    if len(runs) == 1:
        return chart
    names = {run.label: run.title if chart.is_wide else run.tag for run in runs}
    curves = [attrs.evolve(c, label=names.get(c.label, c.label)) for c in chart.curves]
    return attrs.evolve(chart, curves=curves)


def _part(name: str) -> str:
    return files("forgekit.run.reporting").joinpath(name).read_text("utf-8")


def _id(name: str) -> str:
    return f"section-{name.lower().replace(' ', '-')}"


def _link(name: str) -> str:
    return f'<a href="#{_id(name)}">{name}</a>'


def _made(runs: Sequence[RunData], refresh_s: float | None) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    total = sum(run.metrics.rows for run in runs)
    of = f"{len(runs)} runs" if len(runs) > 1 else words(runs[0].folder)
    again = f" It is made again every {refresh_s:g} s while the run goes on." if refresh_s else ""
    return f"Made {now} by forgekit {version_of('forgekit')} from {total:,} rows of {of}.{again}"


def _headline(runs: Sequence[RunData]) -> str:
    """Tiles for one run, a table for several."""
    if len(runs) == 1:
        tiles = (
            f"<div><dt>{words(n.name)}</dt><dd{_alarm(n.is_alarming)}><b>{words(n.value)}</b>"
            f"<i>{words(n.detail)}</i></dd></div>"
            for n in headline(runs[0])
        )
        return f'<dl class="tiles">{"".join(tiles)}</dl>\n'
    found = [headline(run) for run in runs]
    names = ["run", *(number.name for number in found[0])]
    rows = (
        [_key(number, run), *(words(n.value) for n in numbers)]
        for number, (run, numbers) in enumerate(zip(runs, found, strict=True))
    )
    return _table(names, rows)


def _key(number: int, run: RunData) -> str:
    return f'<span class="key c{number % 8}">{words(run.title)}</span>'


def _alarm(is_alarming: bool) -> str:
    return ' class="alarm"' if is_alarming else ""


def _notes(run: RunData) -> Iterator[str]:
    yield from run.notes
    if broken := run.metrics.broken:
        number, text = broken[0]
        many = "1 line" if len(broken) == 1 else f"{len(broken):,} lines"
        yield (
            f"{many} of {run.file} could not be read and are left out; line "
            f"{number} is {text!r}. Repair or delete them before the run is resumed."
        )
    if run.ends_in_half_a_line:
        yield (
            f"{run.file} ends in half a line, which is left out: the run is writing it, or was cut "
            "off. Resuming the run removes it."
        )
    if gaps := run.metrics.gaps():
        named = [f"{name} in {many:,}, step {first:,} first" for name, many, first in gaps[:NAMED]]
        rest = [f"{len(gaps) - NAMED} more"] if len(gaps) > NAMED else []
        yield (
            f"Rows of {run.label} whose number is not finite (NaN, infinite), left out: "
            f"{'; '.join(named + rest)}."
        )
    versions = {e["forgekit"] for e in run.history if isinstance(e.get("forgekit"), str)}
    if others := versions - {version_of("forgekit")}:
        yield (
            f"{run.label} was written by forgekit {', '.join(sorted(others))}, and this page by "
            f"{version_of('forgekit')}: what has another name there is missing here."
        )


def _diagrams(run: RunData) -> dict[str, list[str]]:
    """Pictures that are no curves, by section; those that a run does not have are left out."""
    drawn = {
        "Experts": [expert_maps(run)],
        "Layout": [pipeline_timeline(run), attention_mask(run)],
    }
    return {name: found for name, parts in drawn.items() if (found := [p for p in parts if p])}


def _named(run: RunData, runs: Sequence[RunData], drawn: Iterable[str]) -> Iterator[str]:
    """Diagrams with the name of their run, where there are several."""
    for text in drawn:
        if len(runs) == 1:
            yield text
        else:
            number = runs.index(run) + 1
            named = text.replace("<b>", f"<b>{words(run.tag)}: ", 1)
            yield named.replace('" id="', f'" id="run{number}_', 1)


def _samples(runs: Sequence[RunData]) -> str:
    return "".join(
        f"<h3>{words(_prefix(run, runs))}{words(name)}</h3><pre>{words(text)}</pre>"
        for run in runs
        for name, text in run.samples
    )


def _prefix(run: RunData, runs: Sequence[RunData]) -> str:
    return f"{run.tag}: " if len(runs) > 1 else ""


def _events(runs: Sequence[RunData]) -> str:
    """Starts, ends, changes and bad steps, in the order of time."""
    rows = [row for run in runs for row in _events_of(run)]
    rows.sort(key=lambda row: row[1])
    left = f"<p>The last {EVENTS} of {len(rows)}.</p>" if len(rows) > EVENTS else ""
    named = slice(0 if len(runs) > 1 else 1, None)  # one run needs no column of its name
    happened = _table(
        ["run", "time (UTC)", "step", "what"][named],
        ([words(x) for x in row][named] for row in rows[-EVENTS:]),
    )
    bad = [[run.tag, *_bad_step(record)] for run in runs for record in run.bad_steps]
    listed = ([words(x) for x in row][named] for row in bad[-EVENTS:])
    looked = (
        f"<h3>Bad steps: {len(bad):,}</h3>{_table(['run', *BAD_STEP][named], listed)}<p>null: not "
        "finite. <code>forgekit replay RUN --script FILE</code> looks at one again.</p>"
    )
    return f"{left}{happened if rows else ''}{looked if bad else ''}"


def _bad_step(record: Mapping[str, Any]) -> list[str]:
    return [_value(record.get(key), 80) for key in BAD_STEP]


def _events_of(run: RunData) -> Iterator[tuple[str, str, str, str]]:
    was_started = False
    for event in run.history:
        word = str(event.get("event"))
        if word == "started" and was_started:
            yield (*_at(event, run), "no word of the end before this start: killed, or lost power")
        was_started = word == "started" or (word == "rolled_back" and was_started)
        rest = {k: v for k, v in event.items() if k not in ("event", "time", "step", "samples")}
        said = ", ".join(f"{key} {_value(value, 200)}" for key, value in rest.items() if value)
        yield (*_at(event, run), f"{word.replace('_', ' ')}{': ' * bool(said)}{said}")
    for change in run.changes:
        changed = change.get("changed")
        for key, pair in changed.items() if isinstance(changed, Mapping) else ():
            old, new = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
            yield (*_at(change, run), f"changed: {key} {_value(old, 100)} -> {_value(new, 100)}")


def _at(event: Mapping[str, Any], run: RunData) -> tuple[str, str, str]:
    time = str(event.get("time", "")).replace("T", " ").replace("+00:00", "")
    step = event.get("step")
    return run.tag, time, f"{step:,}" if isinstance(step, int) else ""


def _configuration(runs: Sequence[RunData]) -> str:
    """All keys of one run; of several first those that differ."""
    flat = [dict(_flat(run.config)) for run in runs]
    if not any(flat):
        return ""
    keys = list(dict.fromkeys(key for one in flat for key in one))
    if len(runs) == 1:
        return _list(flat[0])
    differing = [key for key in keys if len({one.get(key) for one in flat}) > 1]
    table = _table(
        ["key", *(words(run.tag) for run in runs)],
        ([words(key), *(words(one.get(key, "")) for one in flat)] for key in differing),
    )
    same = {key: flat[0][key] for key in keys if key not in differing}
    return f"{table}<details><summary>{len(same)} equal keys</summary>{_list(same)}</details>"


def _list(flat: Mapping[str, str]) -> str:
    rows = (
        f"<div><span>{words(key)}</span><span>{words(value)}</span></div>"
        for key, value in flat.items()
    )
    return f'<div class="columns">{"".join(rows)}</div>'


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _value(value, LONGEST_VALUE)


def _value(value: Any, longest: int) -> str:
    if isinstance(value, float):
        return short(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>\n'
