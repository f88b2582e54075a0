"""Plans against runs on real ranks, and the command."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import os
import re
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.distributed as dist
from lab import lay_out
from plan_cells import LONG, MOE, WIDE, Cell, differences, loss_fn, run_cells, setup, step_of
from pool import run_ranks
from rich.console import Console
from runs import MODEL
from tensordict import TensorDict
from torch._subclasses.fake_tensor import DataDependentOutputException

import forgekit as fk
from forgekit.cli import recipes_folder
from forgekit.cli.program import main
from forgekit.huggingface import load
from forgekit.mesh import expert_view
from forgekit.metrics.device_specs import MACHINES
from forgekit.plan.estimate import HIDDEN, HOST_S, LINKS, PRODUCTS, TRAFFIC, estimate, seconds_of
from forgekit.plan.plan import Job, Plan, plan_positions, plan_ranks, plan_step, summed
from forgekit.plan.stand_ins import PlanError, pretending
from forgekit.plan.sweep import LONG as LONG_ROWS
from forgekit.plan.sweep import layouts, show_sweep, sweep
from forgekit.plan.watch import CATEGORIES, Call, StepWatch, Work, dimension_of
from forgekit.steps.cross_entropy import LOGITS, LOGITS_ON_CPU

SMALL = attrs.evolve(WIDE, layers=1, micro_batches=1)
NARROW = attrs.evolve(LONG, layers=2, rows=2, micro_batches=2)
MANY = attrs.evolve(NARROW, rows=1, micro_batches=12)  # more than a pipeline's plan runs
FULL, GPIPE = {"activation_checkpoint": "full"}, {"pipeline_schedule": "gpipe"}
TIED = {"tied": True, "dropout": 0.1}
TWICE = attrs.evolve(SMALL, micro_batches=2)
CHECKED = [
    Cell(name="fsdp2-recomputed", world=2, sizes={}, shape=TWICE, options=FULL, spec=TIED),
    Cell(name="ep2-moe-lora", world=2, sizes={"ep": 2}, shape=NARROW, moe=True, lora={}),
    Cell(name="pp2", world=2, sizes={"pp": 2}, shape=MANY, options=GPIPE, has_logits=True),
    Cell(name="tp2", world=2, sizes={"tp": 2}, shape=SMALL),
]
"""In the default run, one job on two ranks."""


def _layout(name, sizes, **given):
    """A layout on eight ranks with both shapes."""
    shapes = {"wide": WIDE, "long": LONG}
    return [
        Cell(name=f"{name}-{n}", world=8, sizes=sizes, shape=shape, **given)
        for n, shape in shapes.items()
    ]


def _schedule(name):
    """A schedule on two and on four stages' ranks, with recomputation there."""
    given, deep = {"pipeline_schedule": name, "precision": "bf16"}, attrs.evolve(WIDE, layers=8)
    four = {"world": 8, "sizes": {"pp": 4}, "shape": attrs.evolve(deep, micro_batches=8)}
    four = Cell(name=f"pp4-{name}", **four, options=given | FULL)
    return [*_layout(name, {"pp": 2}, options=given), four]


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
DIMENSIONS = ("dp_replicate", "tp", "cp", "pp", "ep")
RING, ULYSSES = ({"context_parallel": name} for name in ("ring", "ulysses"))
SELECTIVE = {"activation_checkpoint": "selective", "precision": "bf16"}
NF4 = attrs.evolve(WIDE, layers=2, dim=128, kv_heads=4)
ODD = attrs.evolve(WIDE, dim=40, ffn_dim=90, vocab_size=67)
LARGE = {
    "fsdp8": _layout("fsdp8", {}, options=SELECTIVE),
    "hsdp2x4": _layout("hsdp", {"dp_replicate": 2}),
    "uneven": [Cell(name="uneven", world=8, sizes={}, shape=ODD)],
    "tp2": _layout("tp2", {"tp": 2}),
    "ring2": [
        *_layout("ring2", {"cp": 2}, options=RING),
        Cell(name="ring2-documents", world=8, sizes={"cp": 2}, documents=3, options=RING),
    ],
    "ulysses2": [
        *_layout("ulysses2", {"cp": 2}, options=ULYSSES),
        Cell(name="ulysses2-documents", world=8, sizes={"cp": 2}, documents=3, options=ULYSSES),
    ],
    "both4": _layout("both4", {"cp": 4}, options={"context_parallel": "both"}),
    **{name: _schedule(name) for name in SCHEDULES},
    "ep4": _layout("ep4", {"ep": 4}, moe=True),
    "lora": _layout("lora", {}, lora={"dropout": 0.1}),
    "nf4": [Cell(name="nf4", world=8, sizes={}, shape=NF4, lora={"base": "nf4"})],
    **{
        f"{a}-{b}": _layout(f"{a}-{b}", {a: 2, b: 2}, moe="ep" in (a, b))
        for a, b in itertools.combinations(DIMENSIONS, 2)
    },
}
"""Each parallelism and their pairs, on eight ranks: a job for each."""
LONG_RUN = (pytest.mark.oracle, pytest.mark.timeout(600))


def job_of(cell, **changes):
    given = {"setup": partial(setup, cell), "world": cell.world, "pp": cell.sizes.get("pp", 1)}
    given["micro_batches"] = lambda _: cell.shape.micro_batches
    given["schedule"] = cell.options.get("pipeline_schedule", "1f1b")
    return Job(**given | changes)


class Foreign(torch.nn.Module):
    """Shared weights, a buffer, own names."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16, 32))

    def forward(self, words):
        return self.head(self.embed(words) * self.scale)


def built_of(model, loss_fn, sizes=None, **batch):
    """What a set-up returns of a model that is laid out, and one batch for all micro-batches."""
    loader = [TensorDict(batch, batch_size=[2])] * 8
    return step_of(lay_out(model(), sizes), loss_fn, loader)


def two_losses(model, batch):
    logits = model(batch["words"])
    return fk.cross_entropy(logits, batch["labels"]) + fk.cross_entropy(logits, batch["labels"])


def test_a_model_that_is_not_ours():
    words = torch.arange(32).view(2, 16)
    labels = words.masked_fill(words < 5, -100)
    foreign = partial(built_of, Foreign, two_losses, words=words, labels=labels)
    (planned,) = plan_ranks(job_of(Cell(name="", world=2, sizes={}), setup=foreign))
    assert planned.parameters == planned.active == 64 * 32
    assert planned.memory["parameters"] == 4 * (64 * 32 / 2 + 16 * 32)
    assert planned.targets == 2 * WIDE.micro_batches * (32 - 5)
    assert planned.work.flops == {torch.float32: WIDE.micro_batches * 6 * 32 * 64 * 32}


def test_a_world_of_more_ranks_is_no_more_work():
    """What is done for each rank of the world would show as calls: a plan is of one."""

    def calls(world):
        count = 0

        def counted(_frame, event, _arg):
            nonlocal count
            count += event in ("call", "c_call")

        job = job_of(Cell(name="", world=world, sizes={}, shape=SMALL))
        plan_step(job)  # imports and caches
        sys.setprofile(counted)
        try:
            plan_step(job)
        finally:
            sys.setprofile(None)
        return count

    assert calls(8192) < 1.2 * calls(8)


JOBS = [pytest.param(CHECKED, id="two ranks")]
JOBS += [pytest.param(cells, id=name, marks=LONG_RUN) for name, cells in LARGE.items()]


@pytest.mark.parametrize("cells", JOBS)
def test_a_plan_is_what_real_ranks_do(cells):
    real = run_ranks(run_cells, cells[0].world, cells, timeout_s=500)
    for number, cell in enumerate(cells):
        planned = plan_ranks(job_of(cell))
        assert len(planned) == cell.sizes.get("pp", 1)
        for one in planned:
            assert differences(cell, one, real[one.rank][number]) == "", (str(cell), one.rank)


WIDER = {"dim": 256, "ffn_dim": 1024, "vocab_size": 1024}
BIG = attrs.evolve(WIDE, positions=256, rows=8, micro_batches=2, **WIDER)


def _memory(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\s+(\d+)", status)[1])


def peak_of_run(_rank, _world, cell):
    """What the system counts for a run of two steps, beside what a process has anyway."""

    def run(cell):
        built = setup(cell)
        state = built.state
        for batches in fk.groups(built.loader, cell.shape.micro_batches):
            state, _ = built.step(state, batches)
        return state

    # Freed tensors go back to the system at once, and do not count for what comes after.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    run(attrs.evolve(cell, shape=WIDE))  # what the first steps of a process load
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = _memory("VmRSS")
    _state = run(cell)
    return _memory("VmHWM") - before


M_MMAP_THRESHOLD = -3


@pytest.mark.oracle
@pytest.mark.parametrize("options", [{}, FULL], ids=str)
def test_the_peak_of_a_plan_is_that_of_a_process(options):
    cell = Cell(name="", world=1, sizes={}, shape=BIG, options=options)
    (real,) = run_ranks(peak_of_run, 1, cell, setup="pool:fresh")
    (planned,) = plan_ranks(job_of(cell))
    assert planned.memory["peak"] == pytest.approx(real, rel=0.02)


def test_the_watch_sees_what_is_there():
    """Sizes by hand: one linear layer under AdamW, in one process."""
    model = torch.nn.Linear(64, 32, bias=False)
    with StepWatch() as watch:
        model = torch.nn.Linear(64, 32, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        watch.label("parameters", model.parameters())
        x = torch.ones(16, 64)
        for _ in range(2):
            watch.end_step()
            watch.begin()
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()
    memory, weight, out, given = watch.memory(), 64 * 32 * 4, 16 * 32 * 4, 16 * 64 * 4
    assert memory["parameters"] == memory["gradients"] == weight
    assert memory["optimizer"] == pytest.approx(2 * weight + given, abs=16)
    assert out <= memory["activations"] <= 2 * out + 16
    assert watch.work.flops == Counter({torch.float32: 2 * 2 * 16 * 64 * 32})
    assert 4 * weight + given <= memory["peak"] <= 4 * weight + given + 4 * out + 64


def test_storages_that_change_their_size_and_those_that_end():
    """FSDP lets gathered parameters go by their storage's size."""
    with StepWatch() as watch:
        gathered = torch.empty(1000)
        gathered.untyped_storage().resize_(0)
        watch.begin()
        gathered.untyped_storage().resize_(4000)
        gathered.untyped_storage().resize_(0)
        for _ in range(3):
            torch.ones(200)
    assert watch.memory()["temporary"] == watch.memory()["peak"] == 4000


def test_attention_by_hand():
    """Two products forward and four backward, half of each where it is causal."""
    q = torch.ones(2, 4, 256, 8, requires_grad=True)
    with StepWatch() as watch:
        for is_causal in (False, True):
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(q, q.detach(), q.detach(), is_causal=is_causal).sum().backward()
    scores = 2 * 4 * 256 * 256
    assert watch.work.flops.total() == 1.5 * (2 + 4) * 2 * scores * 8
    assert watch.memory()["peak"] < 4 * scores


def test_collectives_by_hand():
    with pretending(5, 8, {}), StepWatch() as watch:
        mesh = fk.build_mesh(fk.MeshSpec(dp_replicate=2, dp_shard=2, ep=2, tp=2), device="cpu")
        joined = mesh["dp_shard", "tp"]._flatten("joined").get_group()
        shard, ep = mesh.get_group("dp_shard"), expert_view(mesh).get_group("ep")
        watch.begin()
        parts, whole = torch.empty(12), torch.empty(24)
        dist.all_gather_single(whole, parts, group=shard)
        dist.reduce_scatter_single(parts, whole, group=shard)
        dist.all_reduce(parts, group=joined)
        dist.all_to_all_single(torch.empty(8), torch.empty(8), group=ep)
        found = {(c.op, dimension_of(c, mesh), c.size) for c in watch.work.calls.elements()}
        some, every = Call("", (0, 3), 4), Call("", tuple(range(8)), 4)
        names = [dimension_of(call, mesh) for call in (some, every)]
    shards = {("all_gather", "dp_shard", 96), ("reduce_scatter", "dp_shard", 96)}
    assert found == shards | {("all_reduce", "dp_shard+tp", 48), ("all_to_all", "ep", 32)}
    assert names == ["dp_shard+tp", "dp_replicate+dp_shard+tp"]


def test_micro_batches_that_are_not_run_count():
    cell = Cell(name="", world=2, sizes={}, shape=attrs.evolve(SMALL, micro_batches=5))
    (planned,) = plan_ranks(job_of(cell))
    with pretending(0, 2, {}), StepWatch() as watch:
        built = setup(cell)
        batches = fk.groups(built.loader, 5)
        state, _ = built.step(built.state, next(batches))
        watch.begin()
        built.step(state, next(batches))
    assert planned.work.calls == watch.work.calls
    assert planned.work.flops == watch.work.flops
    # What a run's first call of its step makes once is counted in a plan's second step.
    for name, number in watch.work.kernels.items():
        assert planned.work.kernels[name] == pytest.approx(number, rel=0.02)
    assert planned.targets == 2 * 5 * WIDE.rows * WIDE.positions


@pytest.mark.oracle
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_micro_batches_of_a_pipeline_show_what_many_need(schedule):
    shape = attrs.evolve(SMALL, layers=4, micro_batches=16)
    given = {"shape": shape, "options": {"pipeline_schedule": schedule}}
    job = job_of(Cell(name="", world=2, sizes={"pp": 2}, **given))
    for few, every in zip(plan_ranks(job), plan_positions(job, rounds=16), strict=True):
        assert attrs.evolve(few, agreed_names=None) == attrs.evolve(every, agreed_names=None)


def test_chunks_of_logits_are_those_of_an_accelerator():
    """A CPU would take four of 16 rows here; the plan's memory and traffic are those of one."""
    shape = attrs.evolve(SMALL, dim=16, ffn_dim=16, vocab_size=2**17, rows=1)
    (planned,) = plan_ranks(job_of(Cell(name="", world=2, sizes={}, shape=shape)))
    logits = shape.positions * shape.vocab_size * 4
    assert planned.memory["temporary"] > 2 * logits  # and their gradient
    assert LOGITS_ON_CPU * 4 < logits < LOGITS * 4


def test_stages_add_up_and_collectives_are_of_the_one_with_most():
    shape = attrs.evolve(LONG, layers=2, micro_batches=2)
    cells = (Cell(name="", world=n, sizes={"pp": n}, shape=shape, moe=True) for n in (1, 2))
    jobs = [*map(job_of, cells)]
    planned = [plan_ranks(job) for job in jobs]
    one, two = map(summed, jobs, planned)
    assert (one.parameters, one.active_parameters) == (two.parameters, two.active_parameters)
    routed = MOE.experts * 3 * MOE.ffn_dim * shape.dim
    assert one.parameters - one.active_parameters == routed * (1 - MOE.top_k / MOE.experts)
    assert one.flops_per_step == two.flops_per_step
    assert one.targets_per_step == two.targets_per_step
    seconds = [estimate(MACHINES["h100"], 8, r.work, frozenset()) for r in planned[1]]
    assert two.bubble == pytest.approx(1 / 3)  # (p - 1) / (m + p - 1)
    assert two.step_seconds == pytest.approx(1.5 * max(one.busy for one in seconds))
    light, other = planned[1]
    heavy = attrs.evolve(light, work=light.work.plus(light.work, 1))
    most = summed(jobs[1], [heavy, other]).collectives
    most = {(one["op"], one["dimension"]): (one["count"], one["bytes"]) for one in most}
    assert most.items() >= heavy.traffic.items()
    given = summed(attrs.evolve(jobs[1], device="a100"), planned[1])
    assert given.memory_limit == 0.92 * 80e9
    limits = (given.peak, given.peak - 1)
    at, below = (summed(attrs.evolve(jobs[1], memory_limit=n), planned[1]) for n in limits)
    assert (given.fits, at.fits, below.fits) == (True, True, False)


def test_what_is_computed_again_takes_time_and_is_no_flops():
    """A small model waits for the host, so only a large one shows it."""
    shape = attrs.evolve(SMALL, dim=1024, ffn_dim=4096, rows=64)
    kept, again = (
        plan_step(job_of(Cell(name="", world=1, sizes={}, shape=shape, options=given)))
        for given in ({}, FULL)
    )
    assert again.flops_per_step == kept.flops_per_step
    repeated = kept.flops_per_step / 3 * 0.9  # a forward, but for the head
    least = repeated / (PRODUCTS * MACHINES["h100"].peaks["tf32"])
    assert again.step_seconds - kept.step_seconds > least
    for one in (kept, again):
        expected = one.flops_per_step / (one.step_seconds * MACHINES["h100"].peaks["tf32"])
        assert one.mfu == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=["whole", "stages"])
def test_a_base_is_checked_and_not_read(tmp_path, sizes):
    """Its weights may be of any size: a plan opens them for their names and shapes."""
    spec = fk.TransformerSpec(**MODEL, max_seq_len=16)
    fk.save_huggingface(fk.Transformer(spec), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    head = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:head])
    os.truncate(file, size)
    cell = Cell(name="", world=2, sizes=sizes, shape=TWICE)
    ids = torch.arange(32).view(2, 16)

    def on_base():
        with torch.device("meta"):
            model = fk.Transformer(spec)
        built = built_of(lambda: model, loss_fn, sizes, input_ids=ids, labels=ids.clone())
        fk.load_huggingface(built.state.model, tmp_path)
        return built

    with patch.object(load, "view_of", side_effect=AssertionError("read")):
        plans = plan_ranks(job_of(cell, setup=on_base))
    assert sum(one.memory["parameters"] for one in plans) >= plans[0].parameters * 4 / 2


def reads_its_loss(model, batch):
    loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
    return loss if float(loss.sum) >= 0 else loss + loss


def test_a_number_that_only_computation_gives_is_not_made_up():
    cell = Cell(name="", world=8, sizes={}, shape=SMALL)

    def reading():
        built = setup(cell)
        return step_of(built.state, reads_its_loss, built.loader)

    with pytest.raises(PlanError, match=r"reads a computed value .* computes none"):
        plan_step(job_of(cell, setup=reading))


def test_whole_numbers_that_ranks_exchange_are_what_each_would_bring():
    counts = torch.arange(8).view(4, 2)
    with pretending(2, 4, {}):
        arriving, total = torch.empty_like(counts), counts.clone()
        everyone = [torch.empty_like(counts[0]) for _ in range(4)]
        dist.all_to_all_single(arriving, counts)
        dist.all_gather(everyone, counts[2])
        dist.all_reduce(total)
        with pytest.raises(PlanError, match=r"scatter_.default exchanges numbers .* ranks send"):
            dist.scatter(counts[0], src=0)
        stand_in = torch.empty(4)
        dist.all_reduce(stand_in)
        with pytest.raises(DataDependentOutputException):
            stand_in.sum().item()
    assert arriving.tolist() == torch.stack(everyone).tolist() == [[4, 5]] * 4
    assert torch.equal(total, 4 * counts)


def test_time_of_a_collective_by_hand():
    h100, node = MACHINES["h100"], tuple(range(8))
    link, network = (LINKS * b for b in (h100.link_bandwidth, h100.network_bandwidth))
    across, every = tuple(range(0, 64, 8)), tuple(range(64))  # one device of each of eight nodes
    hops = 14e-6 + 56 * 1.9e-6 + 7 * 4e-6  # all of them, by eight adapters of each node
    for call, expected in (
        (Call("all_gather", node, 8 * 10**9), 14e-6 + 7 * 1.9e-6 + 7e9 / link),
        (Call("all_gather", across, 8 * 10**9), 14e-6 + 7 * 4e-6 + 7e9 / network),
        (Call("reduce_scatter", every, 64 * 10**9), hops + 63e9 / (8 * network)),
        # up and down a tree over eight nodes
        (Call("all_reduce", every, 0), 14e-6 + 14 * 1.9e-6 + 6 * 4e-6),
        (Call("all_reduce", node, 8 * 10**9), 14e-6 + 14 * 1.9e-6 + 14e9 / link),
        (Call("send", (7, 8), 0), 18e-6),
        (Call("all_reduce", (0,), 10**9), 0),
    ):
        assert seconds_of(h100, 8, call) == pytest.approx(expected), call


def test_time_of_a_step_by_hand():
    """Products and traffic add up; what is hidden costs what the computation does not cover."""
    h100, bf16 = MACHINES["h100"], torch.bfloat16
    gather = Call("all_gather", tuple(range(8)), 10**9)
    each = seconds_of(h100, 8, gather)

    def estimated(gathers, *, kernels=1, is_hidden=False):
        counted = Counter({"bytes": 10**12, "count": kernels})
        flops = Counter({bf16: 10**15}), Counter({bf16: 10**14})
        work = Work(Counter({gather: gathers}), *flops, counted)
        return estimate(h100, 8, work, frozenset({gather} if is_hidden else ()))

    compute = 1.1e15 / (PRODUCTS * 989.4e12) + 1e12 / (TRAFFIC * 3.35e12)
    assert estimated(3).compute == pytest.approx(compute)
    assert estimated(3).waiting == pytest.approx(3 * each)
    hidden = estimated(3, is_hidden=True)
    assert (hidden.waiting, hidden.exposed, hidden.busy) == (0, 0, hidden.compute)
    exposed = 10_000 * each - HIDDEN * compute
    assert estimated(10_000, is_hidden=True).exposed == pytest.approx(exposed)
    assert estimated(3, kernels=10**6).compute == HOST_S * 10**6


def test_layouts_of_a_sweep_fill_the_world():
    moe = SimpleNamespace(moe=SimpleNamespace(experts=6))
    config = SimpleNamespace(mesh=fk.MeshSpec(), model=moe, seq_len=LONG_ROWS)
    found = layouts(config, 16, node_size=4)
    assert len(found) == len(set(found)) > 5
    sizes = [spec.pp * spec.tp * spec.cp for spec in found]
    assert sizes == sorted(sizes)
    for spec, size in zip(found, sizes, strict=True):
        assert size * spec.dp_replicate * spec.dp_shard == 16
        assert spec.tp <= 4
        assert spec.dp_shard * spec.cp % spec.ep == 0
    assert {spec.ep for spec in found} == {1, 2}  # 4 does not divide 6 experts
    assert {spec.cp for spec in found} == {spec.pp for spec in found} == {1, 2, 4, 8}
    assert {spec.dp_shard for spec in found if spec.tp * spec.pp * spec.cp == 1} == {1, 4, 16}
    short = SimpleNamespace(mesh=fk.MeshSpec(), seq_len=LONG_ROWS - 1)
    assert {spec.cp for spec in layouts(short, 16, node_size=4)} == {1}


def held(rank, **memory):
    return {"rank": rank, "pp": rank, "memory": {"parameters": 0, "optimizer": 0, **memory}}


SHOWN = {"device": "h100", "memory_limit": 2.0, "ranks": [held(0, peak=1), held(1, peak=2)]}
ONES = dict.fromkeys((field.name for field in attrs.fields(Plan)), 1.0)
PLANNED = Plan(**ONES | SHOWN | {"world": 16, "layout": {}, "collectives": []})


def test_a_sweep_orders_what_fits_by_the_time_of_a_target():
    """Whatever others were; a longer step may have more targets; the fastest does not fit."""
    specs = layouts(SimpleNamespace(mesh=fk.MeshSpec(), seq_len=1), 16, node_size=8)
    of_sizes = {1: (9.0, 1.5), 2: (2.0, 2.0), 8: (3.0, 2.0), 16: (2.5, 2.0)}  # speed and limit

    def plan(spec):
        if (size := spec.pp * spec.tp) == 4:
            raise ValueError("no")
        speed, limit = of_sizes[size]
        changes = {"tokens_per_second_per_device": speed, "memory_limit": limit}
        return attrs.evolve(PLANNED, layout=attrs.asdict(spec), step_seconds=speed, **changes)

    found, refused = sweep(specs, plan, lambda line: None)
    speeds = [one.tokens_per_second_per_device for one in found]
    assert speeds == [*[3.0] * 8, *[2.5] * 3, *[2.0] * 5, *[9.0] * 3]
    assert [one["refused"] for one in refused] == ["ValueError: no"] * 7
    everywhere = [*(one.layout for one in found), *(one["layout"] for one in refused)]
    assert sorted(map(str, everywhere)) == sorted(str(attrs.asdict(spec)) for spec in specs)


def test_a_sweep_shows_what_fits_and_why_others_are_invalid():
    plans = [attrs.evolve(PLANNED, layout={"tp": 2}), attrs.evolve(PLANNED, memory_limit=1.0)]
    show_sweep(plans, [{"refused": "no"}] * 2, Console(file=(shown := io.StringIO()), width=140))
    assert re.search(r"tp=2 +│ yes +│ +0.00 ", shown.getvalue())
    assert re.search(r"one device +│ no +│ +0.00 ", shown.getvalue())
    assert shown.getvalue().endswith("2 x no\n")


def plan(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    return code, capsys.readouterr()


TINY = ("model.dim=32", "model.layers=2", "model.vocab_size=64", "data.seq_len=32")


def test_json_has_the_contracts_fields_without_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = (*TINY, "mesh.tp=2", "batch_size=2", "global_batch_size=16")
    code, said = plan(capsys, "pretrain", *sizes, "--world", 8, "--device", "h200", "--json")
    assert code == 0, said.err
    found = json.loads(said.out)
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2, "ep": 1}
    assert found["layout"] == sizes
    assert (found["world"], found["device"], found["fits"]) == (8, "h200", True)
    assert found["targets_per_step"] == 16 * 32
    assert found["parameters"] == found["active_parameters"]
    assert 0 < found["mfu"] < 1
    speed = found["targets_per_step"] / found["step_seconds"] / 8
    assert found["tokens_per_second_per_device"] == pytest.approx(speed)
    assert found["flops_per_step"] > 6 * 0.8 * found["parameters"] * found["targets_per_step"]
    (rank,) = found["ranks"]
    assert set(rank["memory"]) == {*CATEGORIES, "peak"}
    assert {"op", "dimension", "count", "bytes"} == set(found["collectives"][0])
    assert {c["dimension"] for c in found["collectives"]} == {"tp", "dp_shard", "dp_shard+tp"}
    assert not list(tmp_path.iterdir())


def test_its_options_are_those_of_the_job(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("forgekit.plan.plan.plan_step", lambda job: seen.append(job) or PLANNED)
    given = ("--world", 4, "--device", "a100", "--node-size", 2, "--memory", 3, "--json")
    assert plan(capsys, "pretrain", *TINY, *given)[0] == 0
    (job,) = seen
    assert (job.world, job.device, job.node_size) == (4, "a100", 2)
    assert job.memory_limit == 3 * 2**30


SWEPT = (*TINY, "model.tied=false", "batch_size=2", "global_batch_size=4", "--world", 2)


def test_a_sweep_ranks_layouts(capsys):
    """By time among those that fit; what is not valid ends nothing."""
    code, said = plan(capsys, "pretrain", *SWEPT, "model.kv_heads=1", "--sweep", "--json")
    assert code == 0, said.err
    by_layout = {
        tuple(n for n, v in one["layout"].items() if v > 1): one for one in json.loads(said.out)
    }
    assert set(by_layout) == {("dp_shard",), ("dp_replicate",), ("pp",), ("tp",)}
    invalid = by_layout.pop(("tp",))
    assert "is 1, not a multiple of tp 2" in invalid["refused"]
    found = list(by_layout.values())
    assert [p["step_seconds"] for p in found] == sorted(p["step_seconds"] for p in found)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_stopped_ends_at_once_with_what_it_has(capsys, tmp_path, number):
    """Also where the setup of a recipe has begun to listen to signals for a run."""
    text, listens = (recipes_folder() / "pretrain.py").read_text(), ", fk.StopSignal()\n"
    assert listens in text
    stop = f"{listens}    if next(CALLS) == 1:\n        os.kill(os.getpid(), {int(number)})\n"
    head = "import itertools, os\nCALLS = itertools.count()\n"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        text.replace(listens, stop).replace("import attrs\n", f"{head}import attrs\n")
    )
    code, said = plan(capsys, recipe, *SWEPT, "--sweep", "--json")
    assert code == 130, said.err
    first, *others = [one.get("refused") for one in json.loads(said.out)]
    assert first is None
    assert others[-2:] == ["not planned: interrupted"] * 2


WITHOUT_STEP = """
import attrs, forgekit as fk
@attrs.frozen(kw_only=True)
class Config:
    mesh: fk.MeshSpec = fk.MeshSpec()
def setup(config): return 1, 2, 3
"""
MISTAKES = {
    'must be one of "a100", "h100", "h200", "b200"': ["pretrain", "--device", "h300"],
    "--world and --node-size must be at least 1": ["pretrain", "--world", 0],
    "a tuple without state, step, loader, loss_fn; a step needs": ["recipe.py", "--world", 2],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_refused_with_what_to_do(capsys, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(WITHOUT_STEP)
    code, said = plan(capsys, *MISTAKES[message])
    assert code == 2
    assert message in said.err
