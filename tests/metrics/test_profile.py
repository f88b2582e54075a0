"""A trace of some steps."""

import gzip
import json
from contextlib import nullcontext

import pytest
import torch
from lab import torch_loss, vectors
from pool import run_ranks
from torch.profiler import record_function

import forgekit as fk
from forgekit.metrics import Profile
from forgekit.ranges import named


def train(out, until, mesh=None, fail_at=None, **options):
    """Steps with a range of their own."""
    model = torch.nn.Linear(6, 5).double()
    if mesh is not None:
        model = fk.parallelize(model, mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)

    def loss_fn(model, batch):
        with record_function(f"user step {state.step + 1}"):
            if state.step + 1 == fail_at:
                raise KeyError("a broken row")
            return torch_loss(model, {"input_ids": batch["x"][None], "labels": batch["labels"]})

    step = fk.make_step(loss_fn, schedule=fk.constant(1e-3))
    with Profile(out, **options) as profile:
        while state.step < until:
            state, _ = step(state, vectors(0))
            profile(state)


def trace(path):
    """Names of the ranges of a trace and how many there are."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    return {name: names.count(name) for name in names}


def _on_rank(rank, world, out):
    train(out, 4, fk.build_mesh(device="cpu"), first=2, steps=2)


def test_the_steps_that_are_asked_for_are_those_of_each_ranks_trace(tmp_path):
    run_ranks(_on_rank, 2, tmp_path)
    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == "steps_00000002_00000003"
    for rank in range(2):
        names = trace(folder / f"rank{rank}_dp_shard{rank}.json.gz")
        traced = {name for name in names if name.startswith("user step")}
        assert traced == {"user step 2", "user step 3"}
        counts = {"accumulate": 1, "forward": 2, "backward": 2, "clip": 1, "update": 1}
        assert {part: names[f"forgekit.{part}"] / 2 for part in counts} == counts
        assert "aten::mm" in names
        assert names["gloo:all_gather"] > 0


def test_a_run_that_starts_behind_the_steps_traces_none(tmp_path):
    train(tmp_path, 2, first=0)
    train(tmp_path, 2, first=5)
    assert not (tmp_path / "profile").exists()


FAILS = [(KeyError, 2), (FileExistsError, None), (None, None)]


@pytest.mark.parametrize(("error", "fail_at"), FAILS)
def test_a_trace_ends_with_its_steps_or_an_error(error, fail_at, tmp_path):
    """Torch has one profiler at a time, and without one names cost nothing."""
    if error is FileExistsError:
        (tmp_path / "profile").write_text("in the way")
    with nullcontext() if error is None else pytest.raises((error, NotADirectoryError)):
        train(tmp_path, 3, first=1, steps=2, fail_at=fail_at)
    assert isinstance(named("forward"), nullcontext)
    assert (tmp_path / "profile" / "steps_00000001_00000002").exists() == (error is None)
