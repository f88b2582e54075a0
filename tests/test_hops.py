"""How many files of the package one call goes through: who follows it opens as many."""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path

import report_runs
import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.report import write_report

PACKAGE = f"{Path(fk.__file__).parent}/"
FLOOR_0 = {
    *("checks", "devices", "environment", "files", "ranges", "ranks", "tensors"),
    *("remote/urls", "safetensors_files"),
}
"""Files that call nothing above floor 0; they, the terminal's and the optimizers' do not count."""


@contextmanager
def watched():
    """The files of the package of which this thread executes a function."""
    seen, before = set(), sys.getprofile()

    def begin(frame, event, _arg):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        name = code.co_filename.removeprefix(PACKAGE).removesuffix(".py")
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # no module, no body of a class
        if is_function and name not in FLOOR_0 | {"terminal"} and not name.startswith("optim/"):
            seen.add(name)

    sys.setprofile(begin)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def test_a_save_and_a_load_go_through_six_files(tmp_path):
    model = torch.nn.Linear(3, 2)
    state = fk.TrainState.create(model, fk.adamw(model))
    save, load = fk.checkpoint_save, fk.checkpoint_load  # imported here
    with watched() as saved:
        save(state, tmp_path, blocking=True)
    with watched() as loaded:
        load(state, tmp_path, fingerprint="a")
    for name, seen in {"save": saved, "load": loaded}.items():
        print(f"a {name} goes through {len(seen)} files: {', '.join(sorted(seen))}")  # noqa: T201
        assert 3 <= len(seen) <= 6


class Nothing:
    def __call__(self, step, values):
        """Take numbers."""

    def close(self):
        """Write what is left."""


def test_a_row_of_metrics_goes_through_four_files(tmp_path):
    """With a bad step in it, a line on the screen and a tracker."""
    model = torch.nn.Linear(2, 2)
    state = fk.TrainState.create(model, fk.adamw(model))
    names = ("loss", "grad_norm", "lr", "targets", "skipped")
    metrics = TensorDict({name: torch.ones((), dtype=torch.float64) for name in names}, [])
    with fk.MetricsLog(tmp_path, every=1, trackers=(Nothing(),)) as log:
        state = fk.donate(state, step=1, samples=8)
        with watched() as seen:
            assert log(state, metrics)["train/skipped"] == 1
    print(f"a row of metrics goes through {len(seen)} files: {', '.join(sorted(seen))}")  # noqa: T201
    assert seen >= {"metrics/log", "metrics/records"}
    assert len(seen) <= 4


def test_a_report_goes_through_three_files(tmp_path):
    run = report_runs.write_run(tmp_path / "run")
    rows = fk.metrics.read_metrics(run / "metrics.jsonl")
    drawn = "step", "train/loss", "moe/load/layers.1.feed_forward"  # a chart of each kind
    kept = [{key: value for key, value in row.items() if key in drawn} for row in rows]
    report_runs.lines(run / "metrics.jsonl", kept)
    write_report(run)  # what is imported by now calls nothing more
    with watched() as seen:
        write_report(run)
    print(f"a report goes through {len(seen)} files: {', '.join(sorted(seen))}")  # noqa: T201
    assert len(seen) <= 3
    assert "report" in seen
