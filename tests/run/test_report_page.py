"""The page of a run: what stands in it, whatever the run directory holds."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from report_runs import lines, rows_of, write_long, write_run
from torch import nn

import forgekit as fk
from forgekit.cli import main
from forgekit.run.reporting.curves import linear_ticks, smoothed, thin, trend
from forgekit.run.reporting.growing_files import GrowingFile, Metrics
from forgekit.run.reporting.run_data import open_runs
from forgekit.run.reporting.write import watch, write_report

VOID = {"meta", "img", "br", "path"}


class Page(HTMLParser):
    """A page taken apart; raises if tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.figures, self.texts = [], [], {}, []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if tag == "figure":
            self.figure = self.figures.setdefault(found["id"], [])
            self.figure.append((tag, found))
        elif any(name == "figure" for name in self.open):
            self.figure.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)

    def classes(self, figure):
        return " ".join(found.get("class", "") for _, found in self.figures[figure]).split()

    def points(self, figure, label):
        """Steps and values of a line, back from its coordinates."""
        head = self.figures[figure][0][1]
        (x0, x1), (y0, y1) = (map(float, head[f"data-{axis}"].split()) for axis in "xy")
        (path,) = [f["d"] for _, f in self.figures[figure] if f.get("data-label") == label]
        pairs = [(float(a), float(b)) for a, b in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
        steps = [x0 + (x1 - x0) * x / 1000 for x, _ in pairs]
        up = [1 - y / 1000 for _, y in pairs]
        values = [y0 * (y1 / y0) ** y if "data-log" in head else y0 + (y1 - y0) * y for y in up]
        return steps, values


def page_of(*runs, out=None):
    return Page(write_report(runs, out, pictures=False).page.read_text())


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "a run")


def test_every_part_of_a_run_is_on_its_page(run):
    page = page_of(run)
    assert set(page.figures) >= {
        *("loss", "lr", "grad_norm", "evaluation", "throughput", "times", "memory"),
        *("source_loss", "source_share", "expert_load", "expert_loads", "own_metric"),
        *("pipeline", "attention"),
    }
    for said in (
        *("failed", "OSError: <oh>", "step 40 of 60", "25.0% of it waiting for data; 2 starts"),
        *("held_out, at step 40", "2.525", "the last at step 10", "1.5 GiB", "20 s"),
        *("no word of the end before this start", "started: ranks 8", "phase 1", "started again"),
        *("interleaved_1f1b, bubble", "8 micro-batches (32 rows per step on 8 ranks)", "rank 1"),
        *("def <b>f</b>(): \\x1b[31m", "data.doc_ids", "mesh.pp", "Bad steps: 1", "[7]"),
    ):
        assert said in page.text, said
    assert "run" not in page.texts  # one run needs no column of its name


def test_the_page_loads_nothing_from_elsewhere(run):
    page = page_of(run)
    for tag, found in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "srcset", "action", "data"):
            assert found.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, found)
    text = (run / "report.html").read_text()
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text
    assert set(re.findall(r"\w+://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}


def test_every_chart_names_its_axes_and_no_path_has_a_nan(run):
    page = page_of(run)
    for name, parts in page.figures.items():
        assert {"x-label", "y-label"} <= set(page.classes(name)), name
        drawn = [found["d"] for tag, found in parts if tag == "path"]
        assert drawn or name == "expert_loads"
        assert all(re.fullmatch(r"[MLHVhvz0-9. -]+", d) for d in drawn), name
        if "data-x" in parts[0][1]:
            assert page.classes(name).count("tick") >= 4, name


def test_lines_are_where_the_numbers_are(run):
    page = page_of(run)
    steps, values = page.points("lr", "each row")
    np.testing.assert_allclose(steps, range(1, 41), atol=0.01)
    np.testing.assert_allclose(values, [1e-3 / step for step in range(1, 41)], atol=2e-7)
    steps, values = page.points("grad_norm", "each row")  # logarithmic
    np.testing.assert_allclose(values, [1 / step for step in range(1, 41)], rtol=1e-3)
    steps, values = page.points("loss", "each row")
    assert np.rint(steps).tolist() == [*range(1, 10), *range(11, 41)]  # no loss at step 10
    steps, values = page.points("source_share", "code")
    np.testing.assert_allclose(values, 0.75, atol=1e-3)
    (path,) = [f["d"] for _, f in page.figures["loss"] if f.get("data-label") == "each row"]
    assert path.count("M") == 2


def test_metrics_of_hooks_and_ranks_have_charts_of_their_own(tmp_path):
    rows = rows_of(2)
    rows[1] |= {f"grad_norm/layers.{layer}": 1.0 + layer for layer in range(15)}
    rows[1] |= {"eval/a/loss": 3.0, "eval/a/perplexity": 20.0, "eval/a/bits_per_byte": 1.5}
    rows[1] |= {f"perf/step_seconds_{what}": 1.0 for what in ("min", "mean", "max")}
    lines(tmp_path / "metrics.jsonl", rows)
    page = page_of(tmp_path)
    assert page.points("layer_norm", "layers.14")[1] == pytest.approx([15.0], rel=1e-2)
    odd = ", ".join(f"layers.{layer}" for layer in range(1, 14, 2))
    assert f"Not drawn: {odd}." in page.text  # evenly chosen, and in the order of their numbers
    assert page.points("rank_times", "step_seconds_max")[1] == pytest.approx([1.0])
    assert "other" not in page.text.lower()


def test_an_evaluation_of_one_run_is_drawn_once_more_than_in_its_loss_chart(tmp_path):
    """Bits per byte are a multiple of the loss, and the perplexity follows from it."""
    own = {"eval/a/perplexity": 20.0, "eval/b/loss": 2.0, "eval/c/perplexity": 4.0}
    row = {"step": 1, "eval/a/loss": 3.0, "eval/a/bits_per_byte": 1.5, **own}
    lines(tmp_path / "1" / "metrics.jsonl", [row | {"eval/b/loss": 3.5}])
    lines(tmp_path / "2" / "metrics.jsonl", [row])
    page = page_of(tmp_path / "1")
    assert "a, at step 1; perplexity 20" in page.text
    drawn = [name for name in page.figures if name.startswith("eval")]
    assert drawn == ["evaluation", "evaluation_bits", "evaluation_perplexity"]
    assert page.points("evaluation", "each row")[1] == pytest.approx([3.5])  # of b
    assert page.points("evaluation_bits", "each row")[1] == pytest.approx([1.5])
    assert page.points("evaluation_perplexity", "each row")[1] == pytest.approx([4.0])  # of c
    page = page_of(tmp_path / "1", tmp_path / "2", out=tmp_path / "both.html")
    drawn = [name for name in page.figures if name.startswith("eval")]
    assert drawn == [*("evaluation_a", "evaluation_b"), "evaluation_bits", "evaluation_perplexity"]


def test_marks_are_at_the_steps_of_what_happened(run):
    page = page_of(run)
    low, high = map(float, page.figures["loss"][0][1]["data-x"].split())
    found = {}
    for _, attributes in page.figures["loss"]:
        if "mark" in (kinds := attributes.get("class", "").split()):
            x = float(re.match(r"M([\d.]+) ", attributes["d"])[1])
            found.setdefault(kinds[1], []).append(round(low + (high - low) * x / 1000, 1))
    assert found == {"phase": [20, 40], "start": [25], "bad": [10]}  # sample 320 is step 40


def test_loads_of_experts_are_pixels_in_their_colours(run):
    import base64
    import io

    from matplotlib.image import imread

    page = page_of(run)
    (source,) = [f["src"] for tag, f in page.figures["expert_loads"] if tag == "img"]
    picture = imread(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert picture.shape[:2] == (3, 8)  # three experts, eight rows with loads
    idle, even, busy = (picture[expert, 0, :3] * 255 for expert in range(3))
    assert idle.round().tolist() == [5, 48, 97]
    assert even.round().tolist() == [247, 247, 247]
    assert busy[0] > busy[2] + 50  # red


@pytest.mark.parametrize("seed", range(5))
def test_thinning_keeps_every_extreme(seed):
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1500, 9000))
    steps = np.cumsum(generator.integers(1, 9, count))
    values = generator.normal(size=count) ** 3
    values[generator.random(count) < 0.3] = np.nan
    kept, thinned = thin(steps, values, columns=200)
    assert len(kept) <= 400
    assert np.all(np.diff(kept) > 0)
    known = dict(zip(steps.tolist(), values.tolist(), strict=True))
    pairs = zip(kept.tolist(), thinned.tolist(), strict=True)
    assert all(known[s] == v for s, v in pairs if not math.isnan(v))
    span = int(steps[-1] - steps[0]) + 1
    columns, of_kept = ((s - steps[0]) * 200 // span for s in (steps, kept))
    for column in range(200):
        inside = values[(columns == column) & np.isfinite(values)]
        chosen = thinned[of_kept == column]
        if len(inside):
            assert (np.nanmin(chosen), np.nanmax(chosen)) == (inside.min(), inside.max())


def test_the_mean_is_that_of_a_loop():
    values = np.random.default_rng(0).normal(size=50)
    values[[3, 4, 30]] = np.nan
    found = smoothed(values, half=4)
    for i, value in enumerate(values):
        here = min(i, 4)
        window = values[i - here : i + here + 1]
        expected = np.nan if np.isnan(value) else np.nanmean(window)
        np.testing.assert_allclose(found[i], expected)
        middle = np.nan if np.isnan(value) else np.nanmedian(window)
        np.testing.assert_allclose(trend(np.arange(50), values, half=4)[1][i], middle)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.9, 11.2), (-3e-7, 5e-7), (99_999.5, 100_000.5), (0, 1e30)]
)
def test_ticks_are_round_and_few(low, high):
    ticks = linear_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 * high <= tick <= high * (1 + 1e-9) for tick in ticks)
    assert np.allclose(np.diff(ticks), ticks[1] - ticks[0])


def test_a_spike_far_above_is_drawn_at_the_edge_and_named(tmp_path):
    rows = rows_of(200)
    rows[120]["train/loss"] = 1e6
    lines(tmp_path / "metrics.jsonl", rows)
    page = page_of(tmp_path)
    assert "the largest, 1.0M, at step 121" in page.text
    steps, values = page.points("loss", "each row")
    assert max(values) < 100
    assert round(steps[int(np.argmax(values))]) == 121


def create(step=0):
    model = nn.Linear(2, 2)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    return fk.donate(state, step=step, samples=8 * step)


def test_a_resume_with_another_key_shows(tmp_path):
    """Through the library's own run: config, history and rows are what open_run writes."""
    with fk.open_run(tmp_path, {"steps": 4, "optim": {"lr": 0.003}}) as run:
        with run.start(create(), every=1) as log:
            log.event(create(4), {"train/loss": 3.0}, show=False)
        run.end(create(4))
    with fk.open_run(tmp_path, {"steps": 8, "optim": {"lr": 0.002}}) as run:
        with run.start(create(4), every=1) as log:
            log.event(create(8), {"train/loss": 2.0}, show=False)
        run.end(create(8), "SIGTERM")
    page = page_of(tmp_path)
    text = page.text
    for said in ("changed: steps 4 -> 8", "changed: optim.lr 0.003 -> 0.002", "2 starts"):
        assert said in text
    assert f"torch {torch.__version__}" in text
    assert "stopped: reason SIGTERM" in text
    assert "no word of the end" not in text


def test_what_was_read_piece_by_piece_is_what_the_file_holds(tmp_path):
    """Rows that grow by an evaluation, a resume that cuts rows away, half a line, a broken one."""
    reader, metrics = GrowingFile(tmp_path / "metrics.jsonl"), Metrics()
    most = []

    def look():
        nonlocal metrics
        is_void, new = reader.read()
        if is_void:
            metrics = Metrics()
        elif new:
            metrics.forget_last()
        metrics.add(new)
        most.append(len(new))
        fresh = Metrics()
        fresh.add(GrowingFile(reader.path).read()[1])
        assert (metrics.rows, metrics.broken) == (fresh.rows, fresh.broken)
        for name in fresh.numbers:
            expected, found = fresh.column(name), metrics.column(name)
            np.testing.assert_array_equal(found, expected)
        kept = {name: len(c.steps) for name, c in metrics.numbers.items() if c.steps}
        assert kept == {name: len(c.steps) for name, c in fresh.numbers.items()}
        assert {n: r for n, r in metrics.lists.items() if r} == fresh.lists

    look()
    for start, end in ((0, 30), (20, 24), (24, 40)):
        with fk.MetricsLog(tmp_path, start_step=start) as log:
            for step in range(start + 1, end):
                state = create(step)
                log.event(state, {"train/loss": 1 / step, "a": None}, show=False)
                look()
                if step % 4 == 0:
                    log.event(state, {"eval/x/loss": 2.0, "loads": [1.0, 2.0]}, show=False)
                    look()
    with reader.path.open("a") as file:
        for part in ('{"step": 99, "tra', 'in/loss": 1}\n{"oh', "\n", '{"step": 100, "b": 1}\n'):
            file.write(part)
            file.flush()
            look()
    assert most.count(2) > 30  # the last row again, and the new one
    assert sum(many > 2 for many in most) == 2  # all rows, after each resume
    assert metrics.broken == [(40, '{"oh')]


def test_runs_with_other_keys_are_drawn_over_each_other(tmp_path):
    one, two, three = (tmp_path / name for name in ("x/1", "y/1", "z"))
    lines(one / "metrics.jsonl", [*rows_of(30), {"step": 31, "eval/b/loss": 3.0, "odd": 1.0}])
    lines(two / "metrics.jsonl", rows_of(25, 1.5))
    lines(three / "metrics.jsonl", [{"step": 3, "my_loss": 1.0}, {"step": 9, "my_loss": 2.0}])
    (one / "config.json").write_text('{"lr": 0.1, "same": 7}')
    (two / "config.json").write_text('{"lr": 0.2, "same": 7}')
    (three / "config.json").write_text('{"lr": 0.2, "same": 7, "own": "<i>"}')
    page = page_of(one, two, three, out=tmp_path / "all.html")
    assert (tmp_path / "all.html").exists()
    for label, last in (("x/1", 2 + 5 / 30), ("y/1", 3 + 7.5 / 25)):
        _, values = page.points("loss", label)
        assert values[-1] == pytest.approx(last, rel=0.02)
    assert {"evaluation", "odd", "my_loss", "times_step", "times_data_wait"} <= set(page.figures)
    _, values = page.points("my_loss", "z")
    np.testing.assert_allclose(values, [1, 2], atol=1e-3)
    assert "2 equal keys" not in page.text
    assert "1 equal keys" in page.text
    assert "<i>" in page.text  # as text


def test_runs_with_long_names_have_numbers_in_small_charts(tmp_path):
    names = ["llama-1b-lr3e-4-muon-seed0", "llama-1b-lr6e-4-muon-seed0", "short"]
    for name in names:
        lines(tmp_path / name / "metrics.jsonl", rows_of(3))
        lines(tmp_path / name / "history.jsonl", [{"event": "started", "step": 0}])
        (tmp_path / name / "config.json").write_text(json.dumps({"out": name}))
    page = page_of(*(tmp_path / name for name in names), out=tmp_path / "all.html")
    labels = {f["data-label"] for _, f in page.figures["lr"] if "data-label" in f}
    assert labels == {"run 1", "run 2", "run 3"}
    labels = {f["data-label"] for _, f in page.figures["loss"] if "data-label" in f}
    assert labels == {f"run {number}: {name}" for number, name in enumerate(names, start=1)}
    assert page.texts.count("3 runs") == 2  # the title and the heading
    assert page.text.count("run 2") > 5  # in legends, the configuration and what happened
    assert page.text.count(names[1]) == 3  # in the table of runs, one legend, one configuration


def test_a_mesh_that_takes_what_is_left_has_its_pipeline_drawn(tmp_path):
    config = {"micro_batches": 6, "mesh": {"pp": -1, "dp_shard": 2}, "pipeline_schedule": "1f1b"}
    lines(tmp_path / "metrics.jsonl", rows_of(3))
    (tmp_path / "config.json").write_text(json.dumps(config))
    started = {"event": "started", "step": 0}
    lines(tmp_path / "history.jsonl", [started | {"ranks": 8}])
    page = page_of(tmp_path)
    assert f"1f1b, bubble {3 / 9:.1%}" in page.text  # (ranks - 1) / (micro-batches + ranks - 1)
    assert "6 micro-batches (its configuration)" in page.text
    lines(tmp_path / "history.jsonl", [started | {"ranks": 7}])
    assert "pipeline" not in page_of(tmp_path).figures


def test_a_file_of_metrics_alone_is_enough(tmp_path):
    file = lines(tmp_path / "mine.jsonl", rows_of(3))
    page = page_of(file)
    assert "no status.json" in page.text
    assert {"loss", "lr"} <= set(page.figures)
    assert "section-configuration" not in str(page.tags)


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path):
    """A crash, another tool, a later version: NaN, infinities, texts, huge numbers, half lines."""
    rows = [
        '{"step": 1, "train/loss": NaN, "a": Infinity, "b": "text", "c": {"d": 1}, "e": true}',
        '{"step": 2, "train/loss": 3.0, "a": -Infinity, "b": 1.0, "huge": 1' + "0" * 400 + "}",
        '{"step": 3, "train/loss": 2.0, "b": null, "l": [1, "x"], "m": [], "n": [1, [2]]}',
        "[1, 2]",
        '{"step": -1}',
        '{"step": "4", "train/loss": 9}',
        "[" * 100_000,
        "\udcff",
        '{"step": 3, "train/loss": 2.5}',
        '{"step": 9, "train/lo',
    ]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(rows).encode(errors="surrogateescape"))
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "status.json").write_text('{"status": "hibernating", "new": {"x": 1}}')
    event = {"event": "migrated", "step": None, "forgekit": "9.9", "new": [1]}
    (tmp_path / "history.jsonl").write_text(json.dumps(event) + '\n{"event": "star')
    (tmp_path / "bad_steps.jsonl").write_text('7\n{"step": "x"}\n')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "s.txt").write_bytes(b"\xff</pre><script>alert(1)</script>" * 200)
    page = page_of(tmp_path)
    for said in (
        *("5 lines of", "line 4 is '[1, 2]'", "Repair or delete them", "hibernating"),
        *("config.json is left out, it cannot be read: a list where an object belongs",),
        *("was written by forgekit 9.9", "migrated: forgekit 9.9, new [1]"),
        *("metrics.jsonl ends in half a line, which is left out", "Resuming the run removes it"),
        *("train/loss in 1, step 1 first", "a in 2, step 1 first", "huge in 1, step 2 first"),
    ):
        assert said in page.text, said
    assert [tag for tag, _ in page.tags].count("script") == 1
    steps, values = page.points("loss", "train")
    np.testing.assert_allclose(values, [3.0, 2.5], atol=1e-3)  # of step 3 the later one
    assert np.rint(steps).tolist() == [2, 3]


@pytest.mark.parametrize(("good", "rows"), [(0, 3), (4, 9)])
def test_a_loss_that_is_no_number_any_more_is_no_small_one(tmp_path, good, rows):
    losses = [{"train/loss": 2.0 if step <= good else math.nan} for step in range(1, rows + 1)]
    lines(tmp_path / "metrics.jsonl", [{"step": i} | row for i, row in enumerate(losses, 1)])
    text = page_of(tmp_path).text
    assert f"not finite in the last {rows - good} of {rows} rows" in " ".join(text.split())
    assert f"train/loss in {rows - good}, step {good + 1} first" in text
    assert "half a line" not in text


def test_a_run_that_has_failed_before_its_first_row_has_a_page(tmp_path):
    (tmp_path / "status.json").write_text('{"status": "failed", "reason": "ValueError: no"}')
    assert "ValueError: no" in page_of(tmp_path).text


def test_the_page_is_made_again_while_a_run_goes_on(tmp_path):
    """The run takes its steps while the page sleeps."""
    turns = iter([(5, "running"), None, (10, "running"), (15, "finished")])
    pages, told = [], []

    def go_on(count, word):
        lines(tmp_path / "metrics.jsonl", rows_of(count))
        (tmp_path / "status.json").write_text(json.dumps({"status": word}))

    def sleep(seconds):
        assert seconds == 3.0
        pages.append((tmp_path / "report.html").read_text())
        if turn := next(turns):
            go_on(*turn)

    go_on(0, "running")
    page = watch([tmp_path], None, every_s=3.0, told=told.append, sleep=sleep)
    assert told == [page]
    assert all('<meta http-equiv="refresh" content="3">' in text for text in pages)
    assert pages[1] == pages[2]  # nothing new, so it is not made again
    last = page.read_text()
    assert "refresh" not in last.partition("<style>")[0]
    rows = [int(re.search(r"from (\d+) rows of", text)[1]) for text in (*pages, last)]
    assert rows == [0, 5, 5, 10, 15]


def test_the_command_writes_the_page_and_pictures(tmp_path, capsys):
    rows = [{"step": s, "train/loss": 1 / s, "train/grad_norm": 4**-s} for s in range(1, 31)]
    lines(tmp_path / "metrics.jsonl", [{**rows[0], "train/skipped": 1}, *rows[1:]])
    assert main(["report", str(tmp_path)]) == 0
    drawn = sorted((tmp_path / "report").iterdir())
    assert (tmp_path / "report.html").is_file()
    assert [path.name for path in drawn] == ["grad_norm.png", "loss.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert "2 PNG files" in capsys.readouterr().out


def test_without_matplotlib_the_page_is_written_and_the_remedy_said(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(run)]) == 0
    assert re.search(r'no PNG files: .*pip install "forgekit\[plot\]"', capsys.readouterr().out)
    assert (run / "report.html").is_file()
    assert not (run / "report").exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"nowhere is not there\. Name a run directory: what a recipe's out= was\."),
        (["empty"], r"empty is no run directory: it has no metrics\.jsonl\. Name a run directory"),
        (["."], r"\. is no run directory: .* Runs in it: broken, norows, run\. Name a run"),
        (["norows"], r"metrics\.jsonl has no row yet\. A row is .* --watch waits for it\."),
        (["broken"], r"has no row yet\. Line 1 is 'step 1 loss 3'\. A row is a JSON object"),
        (["run", "run/"], r"run/? is named twice; name each run once\."),
        (["run", "run/metrics.jsonl"], r"is named twice; name each run once\."),
        (
            ["run", "--out", "empty"],
            r"empty is a folder; name the page, such as empty/rep",
        ),
        (
            ["run", "--out", "page.pdf"],
            r"page\.pdf would not open in a browser; name it page\.p",
        ),
        (["run", "--out", "file/a.html"], r"no page was written: .*file.*\. Name one with --out\."),
        (["file"], r"file has no row yet\. Line 1 is 'no metrics'\. A row is a JSON object"),
        (["run", "--watch", "--every", "0"], r"'0' is not a number of seconds from 1 to 86400"),
        (["run", "--every", "nan"], r"'nan' is not a number of seconds from 1 to 86400"),
        (["run", "--every", "soon"], r"'soon' is not a number of seconds from 1 to 86400"),
        (["x" * 300], r"the path"),
        ([], r"the following arguments are required: RUN"),
    ],
)
def test_what_is_no_run_exits_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines(Path("run/metrics.jsonl"), rows_of(2))
    lines(Path("norows/metrics.jsonl"), [])
    Path("broken").mkdir()
    Path("broken/metrics.jsonl").write_text("step 1 loss 3\n")
    Path("empty").mkdir()
    Path("file").write_text("no metrics\n")
    try:
        code = main(["report", *arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.html"))


def test_a_hundred_thousand_steps_take_seconds_and_keep_their_spike(tmp_path):
    write_long(tmp_path / "metrics.jsonl")
    before = time.process_time()
    page = Page(write_report([tmp_path], pictures=False).page.read_text())
    assert time.process_time() - before < 10
    assert (tmp_path / "report.html").stat().st_size < 5e6
    assert "the largest, 1.0M, at step 50,000" in page.text
    steps, values = page.points("loss", "each row")
    assert any(
        v == max(values) and abs(s - 50_000) < 100 for s, v in zip(steps, values, strict=True)
    )
    assert "bad" in page.classes("loss")


def test_only_what_is_new_is_read(tmp_path):
    lines(tmp_path / "metrics.jsonl", rows_of(2000))
    (run,) = open_runs([tmp_path])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2001, "train/loss": 1.0}\n')
    assert run._file._start > 0.99 * (tmp_path / "metrics.jsonl").stat().st_size
    assert run.refresh()
    assert not run.refresh()
    assert run.metrics.rows == 2001
