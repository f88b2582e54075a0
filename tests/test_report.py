"""The page of runs and its pictures: what stands in them, whatever a run directory holds."""

from __future__ import annotations

import fcntl
import html
import os
import re
import sys
from unittest import mock

import pytest
import report_runs
from report_runs import lines, rows_of

from forgekit import report
from forgekit.cli import main
from forgekit.report import plot_losses, write_report


def page_of(run, charts=False):
    """The page; without charts, which take longest, as where matplotlib is missing."""
    find = report.find_spec if charts else lambda name: None
    with mock.patch.object(report, "find_spec", find):
        return write_report(run).read_text()


def text_of(page):
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def test_every_part_of_a_run_is_on_its_page_which_loads_nothing_from_elsewhere(tmp_path):
    run = report_runs.write_run(tmp_path / "run")
    page = page_of(run, charts=True)
    for text in (
        *("Loss", "Learning rate", "Gradient norm before clipping", "Targets per second"),
        *("Loss by source", "own/metric", "moe/load/layers.1", "4 times"),
        *("started", "phase", "bad step", "eval/held_out/loss 2.5250"),
        *("failed; step 40 of 60, OSError: <oh>", "124,500,000", "8 x cuda", "1:00:00"),
        *("Bad steps", "step_00000040", r"def <b>f</b>(): \x1b[31m", "interleaved_1f1b"),
    ):
        assert text in text_of(page), text
    assert page.count("<svg") == 1, "one grid"
    assert "default-src 'none'" in page
    assert not re.search("<(script|link|iframe)", page)
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert address.startswith(("#", "data:image/png;base64,"))


def test_the_headline_says_what_a_run_took(tmp_path):
    took = {"train/targets": 100, "perf/step_seconds": 0.5, "perf/data_wait_seconds": 0.125}
    rows = [row | took | {"perf/mfu": 0.25} for row in rows_of(40)]
    rows[3]["train/skipped"] = 2
    lines(tmp_path / "metrics.jsonl", rows)
    rows = dict(re.findall("<tr><td>(.*?)</td><td>(.*?)</td></tr>", page_of(tmp_path)))
    assert rows["targets"] == "4,000, 200 per second"
    assert rows["MFU"] == "25.0%"
    assert rows["time in steps"] == "0:00:20, 25.0% waiting for data"
    assert (rows["train/loss"], rows["bad steps"]) == ("2.1250", "1"), "rows that had some"


def test_numbers_that_no_axis_can_hold_are_left_out_and_spikes_stay(tmp_path):
    """An integer of 400 digits, a float whose axis would overflow, one far above all others."""
    rows = [{"step": step, "train/loss": 2 + 5 / step} for step in range(1, 4_001)]
    rows[4]["train/loss"], rows[6]["train/loss"], rows[8]["own"] = 1e308, None, 10**400
    rows[1_999]["train/loss"] = 1e6
    lines(tmp_path / "metrics.jsonl", rows)
    page = page_of(tmp_path, charts=True)
    assert len(page) < 2e5
    assert "1 0 5 1 0 6" in text_of(page), "a logarithmic axis up to the spike"
    assert "1 0 7" not in text_of(page)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "samples/a.txt"])
def test_a_pipe_in_place_of_a_file_is_left_out(tmp_path, name):
    """Opening one would wait for a writer that never comes."""
    (tmp_path / "status.json").write_text('{"status": "finished"}')
    (tmp_path / "samples").mkdir()
    os.mkfifo(tmp_path / name)
    assert "cannot be read: [Errno 22] Not a regular file" in text_of(page_of(tmp_path))


def test_a_run_that_nobody_holds_is_killed_and_one_that_is_held_runs(tmp_path):
    lines(tmp_path / "metrics.jsonl", rows_of(3))
    (tmp_path / "status.json").write_text('{"status": "running"}')
    assert "killed: no process holds the run; step 3" in text_of(page_of(tmp_path))
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "running; step 3" in text_of(page_of(tmp_path))


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path):
    lines(tmp_path / "metrics.jsonl", rows_of(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 4, "train/lo')
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "bad_steps.jsonl").write_text("null\n")
    text = text_of(page_of(tmp_path))
    notes = "2 lines of", "line 4 is '[1]'", "line 1 is '{'", "bad_steps.jsonl are left out"
    for note in (*notes, "step 3"):
        assert note in text


def test_without_matplotlib_the_page_has_its_tables(tmp_path, monkeypatch):
    """Whatever imports it or a part of it raises; that nothing did before, test_public sees."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    run = report_runs.write_run(tmp_path / "run")
    page = page_of(run)
    assert 'matplotlib is missing. pip install "forgekit[plot]"' in text_of(page)
    assert "<svg" not in page
    assert "Bad steps" in page
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "forgekit\[plot\]"'):
        plot_losses(run / "metrics.jsonl", tmp_path / "a.png")


NO_RUNS = {
    "nothing": (["empty"], r"empty has no row and no status\.json\. +Pass a run dir"),
    "other text": (["broken"], r"line 1 is 'step 1 loss 3'\. Pass a run directory"),
    "a file in the way": (["run", "--out", "broken/metrics.jsonl/a.html"], r"no page was written"),
}


@pytest.mark.parametrize(("arguments", "message"), NO_RUNS.values(), ids=NO_RUNS)
def test_what_is_no_run_exits_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    lines(tmp_path / "run/metrics.jsonl", rows_of(2))
    lines(tmp_path / "broken/metrics.jsonl", []).write_text("step 1 loss 3\n")
    (tmp_path / "empty").mkdir()
    assert main(["report", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.html"))


def test_a_rank_that_has_no_file_of_the_run_says_so_and_does_not_fail(tmp_path, monkeypatch):
    """The run directory may be on the first rank's machine alone."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = report.wrap_up(None, tmp_path, tmp_path, prompt="def ")
    assert said.startswith(f"no {tmp_path}/metrics.jsonl: {tmp_path} has no row")


LAYERS = [f"moe/load/layers.{layer}.feed_forward" for layer in range(2)]


def draw_charts(metrics, png):
    """Draw the charts of the page as a picture, which is the same bytes each time."""
    png.write_bytes(report._draw(report.Run.read(metrics), ".+", "png"))
    return png


PICTURES = [
    (plot_losses, {"train/loss": 6.0}, {"train/loss": 6.0, "eval/a/loss": 4.0}),
    (draw_charts, {LAYERS[0]: [9.0, 0.0]}, {LAYERS[1]: [1.0, 1.0]}),
]


@pytest.mark.parametrize(("draw", "first", "second"), PICTURES)
def test_each_number_is_in_the_picture(tmp_path, monkeypatch, draw, first, second):
    """Without pyplot, whose global figures belong to the user's own script."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    pictures = set()
    for change in ({}, first, second):
        rows = rows_of(5)
        rows[0]["train/loss"] = None
        rows[-1] |= {"eval/a/loss": 2.1, LAYERS[0]: [1.0, 3.0], LAYERS[1]: [0.5, 2.0]} | change
        path = lines(tmp_path / "m.jsonl", rows)
        pictures.add(draw(path, tmp_path / "m.png").read_bytes())
    assert len(pictures) == 3
    assert all(each.startswith(b"\x89PNG\r\n\x1a\n") for each in pictures)


def test_a_run_without_a_loss_has_no_curve(tmp_path):
    path = lines(tmp_path / "m.jsonl", [{"step": 1, "train/loss": None}])
    with pytest.raises(ValueError, match="has no values of"):
        plot_losses(path, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
