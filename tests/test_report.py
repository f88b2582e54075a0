"""The page of runs and its pictures: what stands in them, whatever a run directory holds."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from html.parser import HTMLParser
from unittest import mock

import numpy as np
import pytest
import report_runs
from report_runs import lines, rows_of

from forgekit import report
from forgekit.cli import main
from forgekit.report import plot_expert_loads, plot_losses, write_report

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Tags that match, tables by their first cells, and text, that of charts too."""

    def __init__(self, path):
        super().__init__()
        self.source, self.open, self.tags, self.texts, self.rows = path.read_text(), [], [], [], []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open += [] if tag in VOID else [tag]
        self.rows += [[]] if tag == "tr" else []

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
            if self.open[-1] == "td":
                self.rows[-1].append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def headline(self):
        return {row[0]: row[1] for row in self.rows if len(row) == 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return report_runs.write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def page(run):
    return Page(write_report([run]))


def few(count, scale=1.0, **values):
    """Rows with a loss alone, whose page has one chart."""
    kept = ("step", "train/loss")
    return [{key: row[key] for key in kept} | values for row in rows_of(count, scale)]


def page_of(*runs, out=None, charts=False):
    """The page; without charts, which take longest, as where matplotlib is missing."""
    find = report.find_spec if charts else lambda name: None
    with mock.patch.object(report, "find_spec", find):
        return Page(write_report(runs, out))


def test_every_part_of_a_run_is_on_its_page(page, run):
    for text in (
        *("Loss", "Learning rate", "Gradient norm before clipping", "Targets per second"),
        *(
            "Loss by source",
            "own/metric",
            "load of each expert",
            "8 micro-batches, simulated: bubble 5.9%",
        ),
        *("Who attends to whom", "Bad steps: 1"),
        *("started again", "phase", "bad step", "step_00000040", "def <b>f</b>(): \ufffd[31m"),
        *("failed; step 40 of 60, OSError: <oh>", "interleaved_1f1b", "eval/held_out/loss"),
    ):
        assert text in page.text, text
    assert not list(run.glob("report/*"))


def test_the_headline_has_the_numbers_that_one_looks_for(tmp_path):
    rows = [
        row | {"train/targets": 100, "perf/mfu": 0.25, "memory/peak_gib": 0.25}
        for row in rows_of(40)
    ]
    lines(tmp_path / "metrics.jsonl", rows)
    begun = {"event": "started", "ranks": 8, "device": "cuda", "parameters": 124_500_000}
    lines(tmp_path / "history.jsonl", [begun, {"event": "stopped"}, begun])
    status = {"status": "finished", "step": 40, "time": "2026-01-03T03:30:00+00:00"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    found = page_of(tmp_path).headline
    assert found["parameters"] == "124.5 M"
    assert found["devices"] == "8 x cuda"
    assert found["targets seen"] == "4,000"
    assert found["MFU"] == "25.0%"
    assert found["starts"] == "2"
    assert found["time in steps"] == "0:00:20, 25.0% waiting for data"
    assert found["peak memory"] == "0.25 GiB"
    assert found["status"].startswith("finished; step 40 of ?, 2026-01-03")


def test_the_page_loads_nothing_from_elsewhere(page):
    assert "default-src 'none'" in page.source
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe")]
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))


def curve_of(page, title):
    """Points of the first curve of a chart, between 0 (low) and 1 (high) on each axis."""
    chart = next(part for part in page.source.split("<svg")[1:] if f">{title}<" in part)
    (path,) = re.findall(r'id="line2d_(?:\d+)">\s*<path d="([^"]{60,})"', chart)[:1]
    points = np.array(re.findall(r"[ML] (\S+) (\S+)", path), float)
    return points[:, 0], -points[:, 1]


def test_numbers_that_no_axis_can_hold_are_named_and_left_out(tmp_path):
    """An integer of 400 digits, and a float whose axis would overflow."""
    rows = few(30)
    rows[4]["train/loss"], rows[6]["train/loss"], rows[8]["own"] = 1e308, -1e308, 10**400
    lines(tmp_path / "metrics.jsonl", rows)
    rows = page_of(tmp_path, charts=True).rows
    assert ["own", "-", "-", "1 of 1 rows, step 9 first"] in rows
    assert [row[3:] for row in rows if row[:1] == ["train/loss"]] == [
        ["2 of 30 rows, step 5 first"]
    ]
    assert plot_losses(tmp_path / "metrics.jsonl", tmp_path / "a.png").is_file()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "samples/a.txt"])
def test_a_pipe_in_place_of_a_file_is_left_out(tmp_path, name):
    """Opening one would wait for a writer that never comes."""
    lines(tmp_path / "metrics.jsonl", rows_of(3))
    (tmp_path / "status.json").write_text('{"status": "finished"}')
    (tmp_path / "samples").mkdir()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert "cannot be read: [Errno 22] Not a regular file" in page_of(tmp_path).text


def test_a_run_that_nobody_holds_is_killed_and_one_that_is_held_runs(tmp_path):
    lines(tmp_path / "metrics.jsonl", rows_of(3))
    (tmp_path / "status.json").write_text('{"status": "running"}')
    assert page_of(tmp_path).headline["status"].startswith("killed: no process holds the run")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert page_of(tmp_path).headline["status"].startswith("running; step 3")


def test_runs_with_other_keys_are_drawn_over_each_other(tmp_path):
    for name, dim in (("a/run", 8), ("b/run", 16)):
        lines(tmp_path / name / "metrics.jsonl", few(3, scale=dim))
        config = {"model": {"dim": dim}, "seed": 1}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    runs = tmp_path / "a/run", tmp_path / "b/run"
    page = page_of(*runs, out=tmp_path / "both.html", charts=True)
    assert "/a/run | " in page.text
    assert ["model.dim", "8", "16"] in page.rows
    assert page.source.index("model.dim") < page.source.index("1 equal keys")
    assert page.source.index("1 equal keys") < page.source.index("<td>seed")


def test_keys_that_the_command_set_stand_apart_from_defaults(tmp_path):
    lines(tmp_path / "metrics.jsonl", rows_of(3))
    config = {"optim": {"lr": 0.1, "eps": 1e-8}, "steps": 9, "seed": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    started = {"event": "started", "arguments": ["--optim.lr=0.1", "steps=9"]}
    lines(tmp_path / "history.jsonl", [started])
    page = page_of(tmp_path)
    assert page.headline.items() >= {"optim.lr": "0.1", "steps": "9"}.items()
    folded = page.source.index("2 others, as by default")
    assert page.source.index("<td>optim.lr") < folded < page.source.index("<td>optim.eps")


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path):
    lines(tmp_path / "metrics.jsonl", rows_of(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 4, "train/lo')
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "bad_steps.jsonl").write_text("null\n")
    text = page_of(tmp_path).text
    assert "2 lines of" in text
    assert "line 4 is '[1]'" in text
    assert "config.json are left out; line 1 is '{'" in text
    assert "bad_steps.jsonl are left out" in text
    assert "step 3" in text


def test_of_many_steps_each_spike_stays(tmp_path):
    rows = few(20_000)
    for row in rows:  # noise
        row["train/loss"] += row["step"] * 7919 % 101 / 100
    rows[9_999]["train/loss"], rows[14_000]["train/loss"] = 1e6, None
    lines(tmp_path / "metrics.jsonl", rows)
    page = page_of(tmp_path, charts=True)
    assert len(page.source) < 2e5
    assert "1 rows above, the largest 1 M" in page.text
    x, y = curve_of(page, "Loss")
    steps = (x - x[0]) / (x[-1] - x[0]) * 19_999 + 1
    assert abs(steps[y.argmax()] - 10_000) < 80, "the line leaves the chart at the spike"


def test_without_matplotlib_the_page_has_its_tables(tmp_path, run, monkeypatch):
    """Whatever imports it or a part of it raises; that nothing did before, test_public sees."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    page = page_of(run, out=tmp_path / "a.html")
    assert 'matplotlib is missing. pip install "forgekit[plot]"' in page.text
    assert "<svg" not in page.source
    assert "Bad steps: 1" in page.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], r"empty has no row of metrics and no status\.json\. +Name a run directory"),
        (["broken"], r"line 1 is 'step 1 loss 3'\. Name a run directory"),
        (["run", "--out", "page.pdf"], r"page\.pdf would not open in a browser"),
        (["run", "--out", "file/a.html"], r"no page was written: .*file.*\. Name one with --out\."),
    ],
)
def test_what_is_no_run_exits_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "run/metrics.jsonl", rows_of(2))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/metrics.jsonl").write_text("step 1 loss 3\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no metrics\n")
    assert main(["report", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.html"))


# Pictures


def test_each_curve_is_in_the_picture(tmp_path, monkeypatch):
    """Without pyplot, whose global figures belong to the user's own script."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    changes = {"train/loss": 6.0, "train/lr": 0.01, "eval/held_out/loss": 4.0, "eval/b/loss": 3.0}
    pictures = []
    for change in ({}, {}, *({key: value} for key, value in changes.items())):
        rows = rows_of(40)
        rows[0]["train/loss"] = None
        rows[-1] |= {"eval/held_out/loss": 2.1} | change
        path = lines(tmp_path / "m.jsonl", rows)
        pictures.append(plot_losses(path, tmp_path / "new" / "m.png").read_bytes())
    assert pictures[0].startswith(b"\x89PNG\r\n\x1a\n")
    assert pictures[0] == pictures[1]
    assert len(set(pictures)) == 1 + len(changes)


def loads(steps, load=1.0, layers=2):
    names = [f"moe/load/layers.{layer}.feed_forward" for layer in range(layers)]
    return [{"step": step, "train/loss": 2.0} for step in (1, 2)] + [
        {"step": step} | {name: [load, 0.0, 3.5, 1.0] for name in names} for step in steps
    ]


def test_the_picture_shows_the_loads(tmp_path):
    """Twice the same one; then other loads; then one row before the first step and one layer."""
    shown = [([10, 20, 25],), ([10, 20, 25],), ([10, 20, 25], 1.5), ([0], 1.0, 1)]
    pictures = []
    for what in shown:
        path = lines(tmp_path / "m.jsonl", loads(*what))
        picture = plot_expert_loads(path, tmp_path / "new" / "m.png", title="a")
        pictures.append(picture.read_bytes())
    assert all(picture.startswith(b"\x89PNG\r\n\x1a\n") for picture in pictures)
    assert pictures[0] == pictures[1]
    assert len(set(pictures)) == 3


@pytest.mark.parametrize(
    ("draw", "rows", "message"),
    [
        (plot_losses, [{"step": 1, "train/loss": None}], "1 rows and no finite loss"),
        (plot_expert_loads, loads([]), r"has no moe/load/\.\.\. in it\. Log them: "),
    ],
)
def test_nothing_to_draw_is_an_error_and_no_picture(tmp_path, monkeypatch, draw, rows, message):
    path, picture = lines(tmp_path / "m.jsonl", rows), tmp_path / "m.png"
    with pytest.raises(ValueError, match=message):
        draw(path, picture)
    assert not picture.exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "forgekit\[plot\]"'):
        draw(path, picture)
