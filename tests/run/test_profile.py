"""A trace of some steps, and the table of where their time went."""

import gzip
import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from device.pretend import NAME
from pool import run_ranks
from tensordict import TensorDict
from torch.autograd import DeviceType
from torch.profiler import record_function

import forgekit as fk
from forgekit.metrics.profile import PARTS, _times
from forgekit.run import Profile
from forgekit.steps.ranges import named

SPEC = fk.TransformerSpec(
    vocab_size=32, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, max_seq_len=16
)
HOST_S, WAIT_S = 0.03, 0.02
NAMES = [name for name, _ in PARTS]


def batch():
    ids = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(0))
    return TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [2])


def train(out, until, mesh=None, fail_at=None, **options):
    """Steps that sleep for a known time, and wait for data for another; what profile returned."""
    model = fk.Transformer(SPEC)
    if mesh is not None:
        model = fk.parallelize(model, mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    loader = SimpleNamespace(wait_seconds=0.0)

    def loss_fn(model, batch):
        with record_function(f"user step {state.step + 1}"):
            if state.step + 1 == fail_at:
                raise torch.OutOfMemoryError("no more")
            return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])

    step = fk.make_step(loss_fn, schedule=fk.constant(1e-3))
    said = []
    with fk.Health(out, mesh), Profile(out, loader=loader, **options) as profile:
        while state.step < until:
            start = time.perf_counter()
            time.sleep(WAIT_S)
            loader.wait_seconds += time.perf_counter() - start
            time.sleep(HOST_S)
            state, _ = step(state, [batch(), batch()])
            said.append(profile(state))
    return said


def trace(path):
    """Names of the ranges of a trace and how many there are."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize(("first", "steps"), [(1, 1), (3, 2)])
def test_the_steps_that_are_asked_for_are_those_of_trace_and_table(first, steps, tmp_path):
    said = train(tmp_path, 5, first=first, steps=steps)
    last = first + steps - 1
    assert [number for number, text in enumerate(said, start=1) if text] == [last]
    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == f"steps_{first:08d}_{last:08d}"
    assert (folder / "table.txt").read_text() == said[last - 1]
    names = trace(folder / "rank0.json.gz")
    traced = {name for name in names if name.startswith("user step")}
    assert traced == {f"user step {number}" for number in range(first, last + 1)}
    counts = {"accumulate": 1, "forward": 2, "backward": 2, "clip": 1, "update": 1}
    assert {part: names[f"forgekit.{part}"] / steps for part in counts} == counts
    assert "aten::mm" in names
    text = said[last - 1]
    assert text.startswith(f"steps {first} to {last}: milliseconds per step")
    rows = {name: line for line in text.splitlines() for name in NAMES if line.startswith(name)}
    means = {name: float(line[len(name) :].split()[1]) for name, line in rows.items()}
    assert means["data wait"] >= 1e3 * WAIT_S
    assert means["host"] >= 1e3 * HOST_S
    assert means["compute"] > 0
    assert means["communication"] == means["hidden communication"] == 0
    parts = sum(means[name] for name in NAMES[1:5])
    assert parts == pytest.approx(means["step"], abs=0.05)
    assert "forgekit.backward" in text


def _on_rank(rank, world, out):
    return train(out, 3, fk.build_mesh(device="cpu"), first=3, steps=1)[-1]


def test_ranks_write_traces_under_their_position_and_share_one_table(tmp_path):
    texts = run_ranks(_on_rank, 2, tmp_path)
    folder = tmp_path / "profile" / "steps_00000003_00000003"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank0_dp_shard0.json.gz",
        "rank1_dp_shard1.json.gz",
        "table.txt",
    ]
    tables = [text.split("\n\n")[0] for text in texts]
    assert tables[0] == tables[1]
    assert (folder / "table.txt").read_text() == texts[0]
    line = next(line for line in tables[0].splitlines() if line.startswith("communication"))
    least, mean, most = map(float, line.split()[1:4])
    assert 0 < least <= mean <= most
    assert trace(folder / "rank1_dp_shard1.json.gz")["gloo:all_gather"] > 0


def _still_busy(rank, world, out):
    """A device that has a fifth of a second of work left when the host is done with a step."""
    synchronize = torch.accelerator.synchronize

    def slowly(*args):
        time.sleep(0.2)
        synchronize(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", slowly)
        (text,) = filter(None, train(out, 2, fk.build_mesh(device=NAME), first=2, steps=1))
    return float(next(line for line in text.splitlines() if line.startswith("step ")).split()[2])


def test_the_last_step_ends_when_the_device_has_done_it(tmp_path):
    (milliseconds,) = run_ranks(_still_busy, 1, tmp_path, setup="device.pretend:install")
    assert milliseconds >= 1e3 * (0.2 + HOST_S + WAIT_S)


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
        event("aten::mm", 2, 3),
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


def test_out_of_memory_ends_the_trace_goes_on_as_an_error_and_leaves_a_snapshot(tmp_path):
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        train(tmp_path, 3, first=1, steps=3, fail_at=2)
    assert not (tmp_path / "profile").exists()
    assert "OutOfMemoryError: no more" in (tmp_path / "memory" / "rank_0.txt").read_text()
    said = train(tmp_path, 2, first=2, steps=1)  # torch has one profiler at a time
    assert said[-1].startswith("steps 2 to 2")


class Allocator:
    """Stands for CUDA's allocator, which forgets its history where that is switched off."""

    def __init__(self, monkeypatch):
        self.history, self.dumped = None, {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "all of it")

    def record(self, enabled="all", max_entries=0):
        self.history = None if enabled is None else max_entries

    def dump(self, path):
        self.dumped[path] = self.history


HISTORY = {
    "to its end": (None, None, {"profile/steps_00000002_00000002/rank0.pickle": 7}),
    # Here Health writes the blocks after it; the history is off by then.
    "out of memory": (
        torch.OutOfMemoryError,
        2,
        {"memory/rank_0_history.pickle": 7, "memory/rank_0.pickle": None},
    ),
    "not written": (OSError, None, {}),
}


@pytest.mark.parametrize("case", HISTORY)
def test_the_history_of_the_allocator_is_kept_in_the_window_and_written_where_memory_runs_out(
    case, tmp_path, monkeypatch
):
    error, fail_at, dumped = HISTORY[case]
    allocator = Allocator(monkeypatch)
    if case == "not written":
        (tmp_path / "profile").write_text("in the way")
    with nullcontext() if error is None else pytest.raises(error):
        train(tmp_path, 3, first=2, steps=1, fail_at=fail_at, memory_history=7)
    assert allocator.dumped == {str(tmp_path / path): size for path, size in dumped.items()}
    assert allocator.history is None
    assert isinstance(named("forward"), nullcontext), "without a profiler names cost nothing"
