"""A trace of some steps, and the table of where their time went."""

import gzip
import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lab import torch_loss, vectors
from pool import run_ranks
from torch.autograd import DeviceType
from torch.profiler import record_function

import forgekit as fk
from forgekit.metrics.profile import PARTS, _times
from forgekit.run import Profile
from forgekit.steps.ranges import named

HOST_S, WAIT_S = 0.03, 0.02
NAMES = [name for name, _ in PARTS]


def train(out, until, mesh=None, fail_at=None, **options):
    """Steps that sleep for a known time, and wait for data for another; what profile returned."""
    model = torch.nn.Linear(6, 5).double()
    if mesh is not None:
        model = fk.parallelize(model, mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    loader = SimpleNamespace(wait_seconds=0.0)

    def loss_fn(model, batch):
        with record_function(f"user step {state.step + 1}"):
            if state.step + 1 == fail_at:
                raise torch.OutOfMemoryError("no more")
            return torch_loss(model, {"input_ids": batch["x"][None], "labels": batch["labels"]})

    step = fk.make_step(loss_fn, schedule=fk.constant(1e-3))
    said = []
    with fk.Health(out, mesh), Profile(out, loader=loader, **options) as profile:
        while state.step < until:
            start = time.perf_counter()
            time.sleep(WAIT_S)
            loader.wait_seconds += time.perf_counter() - start
            time.sleep(HOST_S)
            state, _ = step(state, vectors(0))
            said.append(profile(state))
    return said


def trace(path):
    """Names of the ranges of a trace and how many there are."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    return {name: names.count(name) for name in names}


def times_of(text):
    """Least, mean and most of each part, in milliseconds."""
    lines = {name: line for line in text.splitlines() for name in NAMES if line.startswith(name)}
    return {name: [*map(float, line[len(name) :].split()[:3])] for name, line in lines.items()}


def _on_rank(rank, world, out):
    return train(out, 4, fk.build_mesh(device="cpu"), first=2, steps=2)


def test_the_steps_that_are_asked_for_are_those_of_each_ranks_trace_and_of_one_table(tmp_path):
    both = run_ranks(_on_rank, 2, tmp_path)
    assert [[bool(text) for text in said] for said in both] == [[False, False, True, False]] * 2
    texts = [said[2] for said in both]
    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == "steps_00000002_00000003"
    assert (folder / "table.txt").read_text() == texts[0]
    assert len({*texts}) == 1
    assert texts[0].startswith("steps 2 to 3: milliseconds per step")
    for rank in range(2):
        names = trace(folder / f"rank{rank}_dp_shard{rank}.json.gz")
        traced = {name for name in names if name.startswith("user step")}
        assert traced == {"user step 2", "user step 3"}
        counts = {"accumulate": 1, "forward": 2, "backward": 2, "clip": 1, "update": 1}
        assert {part: names[f"forgekit.{part}"] / 2 for part in counts} == counts
        assert "aten::mm" in names
        assert names["gloo:all_gather"] > 0
    times = times_of(texts[0])
    means = {name: mean for name, (_, mean, _) in times.items()}
    assert means["data wait"] >= 1e3 * WAIT_S
    assert means["host"] >= 1e3 * HOST_S
    assert means["compute"] > 0
    assert 0 < times["communication"][0] <= means["communication"] <= times["communication"][2]
    parts = sum(means[name] for name in NAMES[1:5])
    assert parts == pytest.approx(means["step"], abs=0.05)


def event(name, begin, end, device=DeviceType.CPU, is_user_annotation=False):
    """An event of a trace, from and to a number of seconds."""
    times = SimpleNamespace(start=begin * 1e6, end=end * 1e6)
    return SimpleNamespace(
        name=name, time_range=times, device_type=device, is_user_annotation=is_user_annotation
    )


def test_overlapping_work_counts_once_and_communication_only_where_nothing_is_computed():
    """Seconds 0 to 20: compute 1-4 and 3.5-6, 10-12; collectives 5-8 and 7-9, 11-12; wait 2."""
    events = [
        event("forgekit.accumulate", 0, 20, is_user_annotation=True),
        event("FSDP::all_gather", 0, 20, is_user_annotation=True),
        event("autograd::engine::evaluate_function: MmBackward0", 0, 15),
        event("MmBackward0", 0, 15),
        event("aten::matmul", 1, 4),
        event("aten::mm", 3.5, 6),
        event("fsdp::copy_in", 10, 12),
        event("c10d::allreduce_", 5, 8),
        event("gloo:all_reduce", 7, 9, is_user_annotation=True),
        event("gloo:all_gather", 11, 12, is_user_annotation=True),
    ]
    #            step  wait  communication 6-9  compute 1-6, 10-12  host   hidden 5-6, 11-12
    assert _times(events, 20.0, 2.0) == pytest.approx([20, 2, 3, 7, 8, 2])


def test_on_a_device_its_kernels_count_and_not_their_launches():
    device = DeviceType.CUDA
    events = [
        event("aten::mm", 0, 9),
        event("sm90_gemm", 2, 5, device),
        event("ncclDevKernel_AllReduce", 4, 7, device),
        event("Memcpy DtoH", 8, 9, device),
        event("forgekit.forward", 0, 10, device, is_user_annotation=True),
    ]
    assert _times(events, 10.0, 0.0) == pytest.approx([10, 0, 2, 4, 4, 1])


def test_a_run_that_starts_behind_the_steps_traces_none(tmp_path):
    assert train(tmp_path, 2, first=0) == [None, None]
    assert train(tmp_path, 2, first=5) == [None, None]
    assert not (tmp_path / "profile").exists()


class Allocator:
    """Stands for CUDA's, which forgets its history where it is switched off, and its device."""

    def __init__(self, monkeypatch):
        self.history, self.dumped = None, {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "all of it")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: time.sleep(0.2))

    def record(self, enabled="all", max_entries=0):
        self.history = None if enabled is None else max_entries

    def dump(self, path):
        self.dumped[path] = self.history


HISTORY = {
    # Here Health writes the blocks after it; the history is off by then.
    "out of memory": (
        torch.OutOfMemoryError,
        2,
        {"memory/rank_0_history.pickle": 7, "memory/rank_0.pickle": None},
    ),
    "not written": (OSError, None, {}),
    "to its end": (None, None, {"profile/steps_00000001_00000002/rank0.pickle": 7}),
}


@pytest.mark.parametrize("case", HISTORY)
def test_a_trace_ends_with_its_device_or_an_error_and_the_allocators_history_with_it(
    case, tmp_path, monkeypatch
):
    """Of memory that ran out there is no trace, and a report; torch has one profiler at a time."""
    error, fail_at, dumped = HISTORY[case]
    allocator = Allocator(monkeypatch)
    if case == "not written":
        (tmp_path / "profile").write_text("in the way")
    with nullcontext() if error is None else pytest.raises(error):
        said = train(tmp_path, 3, first=1, steps=2, fail_at=fail_at, memory_history=7)
        assert times_of(said[1])["step"][1] >= 1e3 * (0.2 / 2 + HOST_S + WAIT_S)
    assert allocator.dumped == {str(tmp_path / path): size for path, size in dumped.items()}
    assert allocator.history is None
    assert isinstance(named("forward"), nullcontext), "without a profiler names cost nothing"
    if fail_at:
        assert not (tmp_path / "profile").exists()
        assert "OutOfMemoryError: no more" in (tmp_path / "memory" / "rank_0.txt").read_text()
