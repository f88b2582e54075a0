"""Rows in TensorBoard read back by its own reader; W&B as it is called; and trackers that fail."""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import closing
from unittest import mock

import pytest
from metrics.test_metrics import create, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

import forgekit as fk
from forgekit.metrics.log import MetricsLog
from forgekit.metrics.records import read_metrics
from forgekit.metrics.trackers import GuardedTracker
from forgekit.state import donate


def steps_of(log, state, steps):
    for step in steps:
        state, _ = train(log, state, [step])
        if step % 5 == 0:
            log.event(state, {"eval/a/loss": float(step)})
    return state


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def __call__(self, step, values):
        self.calls.append((step, dict(values)))

    def start(self, step, config):
        self.calls.append(("start", step, dict(config)))

    def status(self, text):
        self.calls.append(("status", text))

    def close(self):
        self.calls.append("closed")


def test_a_tracker_gets_each_row_and_event_the_configuration_and_how_the_run_ended(tmp_path):
    """And is started again where the run goes back; lists and texts are no numbers."""
    kept, other, config = Kept(), Kept(), {"steps": 5}
    with (  # noqa: PT012
        pytest.raises(KeyError, match="mine"),
        MetricsLog(tmp_path, every=5, trackers=(kept, other), config=config) as log,
    ):
        state = steps_of(log, create(), range(1, 6))
        log.rewind(state := donate(state, step=2, samples=16))
        log.event(state, {"moe/load/layers.0": [0.5, 0.5], "note": "a", "eval/a/loss": 2.0})
        raise KeyError("mine")
    start, row, event, again, later, status, closed = kept.calls
    assert (start, again) == (("start", 0, config), ("start", 2, config))
    assert row[0] == event[0] == 5
    assert {"samples": 40, "train/loss": 5.0, "train/lr": 5e-3}.items() <= row[1].items()
    assert event[1] == {"eval/a/loss": 5.0}  # what the row had is not shown twice
    assert later == (2, {"samples": 16, "eval/a/loss": 2.0})
    assert (status, closed) == (("status", "failed: KeyError"), "closed")
    assert kept.calls == other.calls
    (written,) = read_metrics(tmp_path / "metrics.jsonl")
    assert written["moe/load/layers.0"] == [0.5, 0.5]


def broken(where, error):
    """A tracker that fails, or hangs without an error, in one of its calls."""

    def fail(self, *args):
        self.calls.append("failed")
        if error is None:
            time.sleep(10)
        raise error

    return type("Broken", (Kept,), {where: fail})()


FAILS = {
    "an error": ("__call__", RuntimeError("no network"), "failed: RuntimeError: no network"),
    "an exit": ("start", SystemExit(3), "failed: SystemExit: 3"),
    "an error at its end": ("close", OSError("full"), "failed: OSError: full"),
    "hangs": ("__call__", None, "does not keep up, or hangs"),
    "hangs at its end": ("close", None, "does not keep up, or hangs"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_tracker_that_fails_or_hangs_costs_one_message(tmp_path, monkeypatch, case, capfd):
    where, error, says = FAILS[case]
    monkeypatch.setattr("forgekit.metrics.trackers.CLOSING_S", 0.1)
    after, started = Kept(), time.perf_counter()
    trackers = (broken(where, error), after)
    with MetricsLog(tmp_path, every=1, trackers=trackers) as log:
        for steps in ([1, 2], [3, 4]):
            for step in steps:
                steps_of(log, create(), [step])
                wait_for(log._trackers[1])
            time.sleep(0.1)
        log.status("finished")
        wait_for(log._trackers[1])
    assert time.perf_counter() - started < 3
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("step ")]
    assert lines == [f"tracker Broken {says}; metrics.jsonl has all rows"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "Broken")
    assert error is None or trackers[0].calls[-1] == "failed", "it is left alone"
    assert [call[0] for call in after.calls] == ["start", 1, 2, 3, 4, "status", "c"]


def test_a_tracker_that_hangs_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("forgekit.metrics.trackers.ROOM", 3)
    monkeypatch.setattr("forgekit.metrics.trackers.CLOSING_S", 0.1)
    lines = []
    guarded = GuardedTracker(broken("__call__", None), lines.append)
    for step in range(50):
        guarded(step, {"a": 1})
    guarded.close()
    assert lines == ["tracker Broken does not keep up, or hangs; metrics.jsonl has all rows"]


def scalars(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    texts = [tag for tag in tags["tensors"] if "text_summary" in tag]
    return {tag: accumulator.Scalars(tag) for tag in tags["scalars"]}, texts


def wait_for(guarded):
    while guarded._calls.unfinished_tasks:
        time.sleep(0.01)


def test_tensorboard_shows_each_step_once_after_a_kill_and_a_resume(tmp_path):
    """Killed at 7 with a checkpoint at 5: what was flushed by then is there, nothing is closed."""
    config, tracker = {"a": [1, math.nan]}, fk.TensorBoard(tmp_path)
    killed = MetricsLog(tmp_path, every=1, trackers=(tracker,), config=config)
    state = steps_of(killed, create(), range(1, 8))
    wait_for(killed._trackers[0])
    time.sleep(1.1)  # files are read in the order of the seconds in their names
    with MetricsLog(tmp_path, start_step=5, every=1, trackers=(fk.TensorBoard(tmp_path),)) as log:
        log.event(state := donate(state, step=5, samples=40), {"eval/a/loss": 5.0})
        steps_of(log, state, range(6, 11))
        log.status("finished")
    shown, texts = scalars(tmp_path / "tensorboard")
    losses = [(event.step, event.value) for event in shown["train/loss"]]
    assert losses == [(step, 10.0 - step) for step in range(1, 11)]
    assert [event.step for event in shown["eval/a/loss"]] == [5, 10]
    assert [event.step for event in shown["samples"]] == [*range(1, 11)]
    assert {tag.split("/")[0] for tag in texts} == {"config"}
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 11)]
    killed.close()


def test_a_row_is_in_tensorboards_file_when_it_has_been_taken(tmp_path, monkeypatch):
    """On a slow disk too, and with nothing closed: tensorboard writes from a thread of its own."""
    write = RecordWriter.write
    monkeypatch.setattr(RecordWriter, "write", lambda *args: (time.sleep(0.02), write(*args)))
    with closing(fk.TensorBoard(tmp_path)) as tracker:
        tracker.start(0, {})
        tracker(1, {f"a/{name}": 1.0 for name in range(8)})
        shown, _ = scalars(tmp_path / "tensorboard")
        assert len(shown) == 8


def go_on(out, tracker, first, last):
    """A run from one step to another, with the evaluation of the first one again."""
    with MetricsLog(out, start_step=first, every=1, trackers=(tracker,)) as log:
        state = donate(create(), step=first, samples=8 * first)
        if first:
            log.event(state, {"eval/a/loss": float(first)})
        steps_of(log, state, range(first + 1, last + 1))
        log.status("finished")
        wait_for(log._trackers[0])


def test_wandb_goes_on_with_its_run_and_is_sent_the_rows_after_the_checkpoint(
    tmp_path, monkeypatch
):
    fake = mock.Mock(summary={})
    fake.init.return_value = fake
    monkeypatch.setattr("forgekit.metrics.trackers.require", lambda name, extra: fake)
    for first, last in ((0, 7), (5, 10)):
        go_on(tmp_path, fk.WandB(tmp_path, project="p", mode="offline"), first, last)
    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    begun, again = (call.kwargs for call in fake.init.call_args_list)
    wanted = {"id": run_id, "resume": "allow", "project": "p", "mode": "offline"}
    assert begun.items() >= wanted.items()
    assert (again, fake.finish.call_count, fake.summary) == (begun, 2, {"status": "finished"})
    assert mock.call("*", step_metric="train/step") in fake.define_metric.call_args_list
    rows = [call.args[0] for call in fake.log.call_args_list]
    losses = [(row["train/step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(step, 10.0 - step) for step in (*range(1, 8), *range(6, 11))]
    assert [row["train/step"] for row in rows if "eval/a/loss" in row] == [5, 10]


@pytest.mark.oracle
def test_wandb_itself_keeps_one_run_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, last in ((0, 3), (2, 5)):
        go_on(tmp_path, fk.WandB(tmp_path, project="p", mode="offline"), first, last)
        time.sleep(1.1)  # W&B names folders for the second
    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert len([*(tmp_path / "wandb").glob(f"*run-*-{run_id}")]) == 2


def test_a_run_with_an_unknown_tracker_is_a_usage_error(tmp_path, capfd):
    with pytest.raises(SystemExit) as left, fk.open_run(tmp_path, {"trackers": ("mlflow",)}):
        pass
    assert left.value.code == 2
    expected = 'error: unknown trackers "mlflow"; the known ones are "tensorboard", "wandb".'
    assert expected in capfd.readouterr().err
