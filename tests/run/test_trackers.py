"""Rows in TensorBoard and W&B, read back by their own readers; and trackers that fail."""

from __future__ import annotations

import json
import math
import resource
import signal
import struct
import threading
import time
from contextlib import closing

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from tensordict import TensorDict

import forgekit as fk
from forgekit.metrics.log import MetricsLog
from forgekit.metrics.records import read_metrics
from forgekit.metrics.trackers import GuardedTracker
from forgekit.state import TrainState, donate


def make_state():
    model = torch.nn.Linear(2, 2)
    return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def metrics_of(step):
    values = {"loss": 10.0 - step, "grad_norm": 0.5, "lr": 1e-3, "targets": 8.0, "skipped": 0.0}
    return TensorDict({k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()}, [])


def steps_of(log, state, steps):
    for step in steps:
        state = donate(state, step=step, samples=8 * step)
        log(state, metrics_of(step))
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
        state = steps_of(log, make_state(), range(1, 6))
        log.rewind(state := donate(state, step=2, samples=16))
        log.event(state, {"moe/load/layers.0": [0.5, 0.5], "note": "a", "eval/a/loss": 2.0})
        raise KeyError("mine")
    start, row, event, again, later, status, closed = kept.calls
    assert (start, again) == (("start", 0, config), ("start", 2, config))
    assert row[0] == event[0] == 5
    assert {"samples": 40, "train/loss": 5.0, "train/lr": 1e-3}.items() <= row[1].items()
    assert event[1] == {"eval/a/loss": 5.0}  # what the row had is not shown twice
    assert later == (2, {"samples": 16, "eval/a/loss": 2.0})
    assert (status, closed) == (("status", "failed: KeyError"), "closed")
    assert kept.calls == other.calls
    (written,) = read_metrics(tmp_path / "metrics.jsonl")
    assert written["moe/load/layers.0"] == [0.5, 0.5]


class Broken(Kept):
    """Fails in one of its calls."""

    def __init__(self, where, error):
        def fail(self, *args):
            self.calls.append("failed")
            if error is None:
                time.sleep(10)
            raise error

        super().__init__()
        self.__class__ = type("Broken", (Kept,), {where: fail})


FAILS = {
    "an error": ("__call__", RuntimeError("no network"), "failed: RuntimeError: no network"),
    "an exit": ("start", SystemExit(3), "failed: SystemExit: 3"),
    "an error at its end": ("close", OSError("full"), "failed: OSError: full"),
    "hangs": ("__call__", None, "hangs for 0 s"),
    "hangs at its end": ("close", None, "has not ended in 0.1 s"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_tracker_that_fails_or_hangs_costs_one_message(tmp_path, monkeypatch, case, capfd):
    where, error, says = FAILS[case]
    monkeypatch.setattr("forgekit.metrics.trackers.PATIENCE_S", 0.05)
    monkeypatch.setattr("forgekit.metrics.trackers.CLOSING_S", 0.1)
    after, started = Kept(), time.perf_counter()
    trackers = (Broken(where, error), after)
    with MetricsLog(tmp_path, every=1, trackers=trackers) as log:
        for steps in ([1, 2], [3, 4]):
            for step in steps:
                steps_of(log, make_state(), [step])
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
    guarded = GuardedTracker(Broken("__call__", None), lines.append)
    for step in range(50):
        guarded(step, {"a": 1})
    guarded.close()
    assert lines == ["tracker Broken is 3 calls behind; metrics.jsonl has all rows"]


def scalars(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    texts = [tag for tag in tags["tensors"] if "text_summary" in tag]
    return {tag: accumulator.Scalars(tag) for tag in tags["scalars"]}, texts


def wait_for(guarded):
    while guarded._calls.qsize() or guarded._since is not None:
        time.sleep(0.01)


def test_tensorboard_shows_each_step_once_after_a_kill_and_a_resume(tmp_path):
    """Killed at 7 with a checkpoint at 5: what was flushed by then is there, nothing is closed."""
    killed = MetricsLog(
        tmp_path, every=1, trackers=(fk.TensorBoard(tmp_path),), config={"a": [1, math.nan]}
    )
    state = steps_of(killed, make_state(), range(1, 8))
    wait_for(killed._trackers[0])
    time.sleep(1.1)  # files are read in the order of the seconds in their names
    with MetricsLog(tmp_path, start_step=5, every=1, trackers=(fk.TensorBoard(tmp_path),)) as log:
        log.event(state := donate(state, step=5, samples=40), {"eval/a/loss": 5.0})
        steps_of(log, state, range(6, 11))
        log.status("finished")
    shown, texts = scalars(tmp_path / "tensorboard")
    assert [event.step for event in shown["train/loss"]] == [*range(1, 11)]
    assert [event.value for event in shown["train/loss"]] == [10.0 - step for step in range(1, 11)]
    assert [event.step for event in shown["eval/a/loss"]] == [5, 10]
    assert [event.step for event in shown["samples"]] == [*range(1, 11)]
    assert {tag.split("/")[0] for tag in texts} == {"config", "status"}
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 11)]
    killed.close()


def test_a_row_is_in_tensorboards_file_when_it_has_been_taken(tmp_path, monkeypatch):
    """On a slow disk too, and with nothing closed: tensorboard writes from a thread of its own."""
    write = RecordWriter.write
    monkeypatch.setattr(RecordWriter, "write", lambda *args: (time.sleep(0.02), write(*args)))
    with closing(fk.TensorBoard(tmp_path)) as tracker:
        tracker(1, {f"a/{name}": 1.0 for name in range(8)})
        shown, _ = scalars(tmp_path / "tensorboard")
        assert len(shown) == 8


def records(path):
    """What a W&B file holds: LevelDB's log format, after a header of seven bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32_768 - at % 32_768) < 7:
            at += room
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def history(out):
    """Rows of the W&B files of a run directory, in their order, ids of its runs, and its axes."""
    from wandb.proto import wandb_internal_pb2

    rows, ids, axes = [], set(), set()
    for path in sorted((out / "wandb").glob("*run-*/run-*.wandb")):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                pairs = ((item.key or item.nested_key[0], item.value_json) for item in items)
                rows.append({name: json.loads(value) for name, value in pairs})
            elif kind == "run":
                ids.add((record.run.run_id, record.run.project))
            elif kind == "metric":
                metric = record.metric
                axes.add((metric.name or metric.glob_name, metric.step_metric))
    return rows, ids, axes


@pytest.mark.oracle
def test_wandb_goes_on_with_its_run_and_is_sent_the_rows_after_the_checkpoint(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, last in ((0, 7), (5, 10)):
        tracker = fk.WandB(tmp_path, project="p", mode="offline")
        with MetricsLog(tmp_path, start_step=first, every=1, trackers=(tracker,)) as log:
            state = donate(make_state(), step=first, samples=8 * first)
            if first:  # the evaluation of this step comes again
                log.event(state, {"eval/a/loss": float(first)})
            steps_of(log, state, range(first + 1, last + 1))
            log.status("finished")
            wait_for(log._trackers[0])
        time.sleep(1.1)  # W&B names folders for the second
    rows, ids, axes = history(tmp_path)
    assert ids == {(json.loads((tmp_path / "wandb.json").read_text())["id"], "p")}
    assert ("*", "train/step") in axes
    losses = [(row["train/step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(step, 10.0 - step) for step in (*range(1, 8), *range(6, 11))]
    evaluated = [(row["train/step"], row["eval/a/loss"]) for row in rows if "eval/a/loss" in row]
    assert evaluated == [(5, 5.0), (10, 10.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_one_message(tmp_path, capfd):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tracker, config = fk.TensorBoard(tmp_path), {"long": "x" * 20_000}
    try:
        with MetricsLog(tmp_path, every=1, trackers=(tracker,), config=config) as log:
            state = steps_of(log, make_state(), [1])
            time.sleep(0.5)
            (events,) = (tmp_path / "tensorboard").glob("events*")
            assert events.stat().st_size > 20_000
            resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 10, before[1]))
            steps_of(log, state, [2, 3, 4])
            time.sleep(0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    said = capfd.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("tracker ")]  # of ours; it has a thread too
    assert len(lines) == 1
    assert lines[0].startswith("tracker TensorBoard failed: OSError: ")
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_with_an_unknown_tracker_is_a_usage_error(tmp_path, capfd):
    with pytest.raises(SystemExit) as left, fk.open_run(tmp_path, {"trackers": ("mlflow",)}):
        pass
    assert left.value.code == 2
    expected = 'error: there are no trackers "mlflow"; there are "tensorboard", "wandb".'
    assert expected in capfd.readouterr().err
