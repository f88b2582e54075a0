"""Plans against runs on real ranks, and the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from plan_cells import Cell, collectives_of, run_cell, setup
from ranks import run_ranks
from torch._subclasses.fake_tensor import DataDependentOutputException

import forgekit as fk
from forgekit.cli.plan_command import layouts
from forgekit.cli.program import main
from forgekit.run.machines import MACHINES
from forgekit.run.plan.collectives import Call
from forgekit.run.plan.estimate import LATENCY_NODE_S, LINKS, seconds_of
from forgekit.run.plan.plan import Job, plan_ranks, plan_step
from forgekit.run.plan.stand_ins import PlanError, Told, pretending
from forgekit.run.plan.watch import StepWatch

CHECKED = [
    Cell(
        name="fsdp2-bf16-recomputed-5",
        world=2,
        sizes={},
        micro_batches=5,
        layers=2,
        options={"precision": "bf16", "activation_checkpoint": "full"},
    ),
    Cell(name="ep2-moe-lora", world=2, sizes={"ep": 2}, moe=True, lora=True, layers=2),
    Cell(name="pp2", world=2, sizes={"pp": 2}, layers=2),
]
"""In the default run."""
E8 = {"world": 8}
LARGE = [
    Cell(name="fsdp8", **E8, sizes={}),
    Cell(name="fsdp8-selective", **E8, sizes={}, options={"activation_checkpoint": "selective"}),
    Cell(name="hsdp2x4", **E8, sizes={"dp_replicate": 2}, micro_batches=3),
    Cell(name="tp2", **E8, sizes={"tp": 2}),
    Cell(name="ring2", **E8, sizes={"cp": 2}),
    Cell(name="ulysses2", **E8, sizes={"cp": 2}, options={"context_parallel": "ulysses"}),
    Cell(name="both4", **E8, sizes={"cp": 4}, options={"context_parallel": "both"}),
    Cell(name="pp4", **E8, sizes={"pp": 4}, micro_batches=4),
    Cell(
        name="pp2-interleaved",
        **E8,
        sizes={"pp": 2},
        micro_batches=4,
        options={"pipeline_schedule": "interleaved_1f1b"},
    ),
    Cell(
        name="pp2-zbv", **E8, sizes={"pp": 2}, micro_batches=4, options={"pipeline_schedule": "zbv"}
    ),
    Cell(name="ep4", **E8, sizes={"ep": 4}, moe=True),
    Cell(name="lora", **E8, sizes={}, lora=True),
    Cell(name="hsdp-tp", **E8, sizes={"dp_replicate": 2, "tp": 2}),
    Cell(name="hsdp-cp", **E8, sizes={"dp_replicate": 2, "cp": 2}),
    Cell(name="hsdp-pp", **E8, sizes={"dp_replicate": 2, "pp": 2}),
    Cell(name="hsdp-ep", **E8, sizes={"dp_replicate": 2, "ep": 2}, moe=True),
    Cell(name="tp-cp", **E8, sizes={"tp": 2, "cp": 2}),
    Cell(name="tp-pp", **E8, sizes={"tp": 2, "pp": 2}),
    Cell(name="tp-ep", **E8, sizes={"tp": 2, "ep": 2}, moe=True),
    Cell(name="cp-pp", **E8, sizes={"cp": 2, "pp": 2}),
    Cell(name="cp-ep", **E8, sizes={"cp": 2, "ep": 2}, moe=True),
    Cell(name="pp-ep", **E8, sizes={"pp": 2, "ep": 2}, moe=True),
]
"""Each parallelism and their pairs, on eight ranks."""


def job_of(cell, **changes):
    given = {
        "setup": partial(setup, cell),
        "micro_batches": lambda _: cell.micro_batches,
        "world": cell.world,
        "pp": cell.sizes.get("pp", 1),
        "schedule": cell.options.get("pipeline_schedule", "1f1b"),
    }
    return Job(**given | changes)


@pytest.mark.parametrize(
    "cell", [*CHECKED, *(pytest.param(c, marks=pytest.mark.oracle) for c in LARGE)], ids=str
)
def test_a_plan_is_what_real_ranks_do(cell):
    real = run_ranks(run_cell, cell.world, cell, timeout_s=200)
    planned = plan_ranks(job_of(cell))
    assert len(planned) == cell.sizes.get("pp", 1)
    for one in planned:
        theirs = real[one.rank]
        assert collectives_of(one.calls, one.dimensions) == theirs["collectives"]
        assert dict(one.work.flops) == theirs["flops"]
        assert one.targets == theirs["targets"]
        for category, size in theirs["memory"].items():
            assert one.memory[category] == pytest.approx(size, rel=0.1), category


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
    memory, weight, out = watch.memory(), 64 * 32 * 4, 16 * 32 * 4
    assert memory["parameters"] == memory["gradients"] == weight
    assert memory["optimizer"] == pytest.approx(2 * weight + 16 * 64 * 4, abs=16)  # and the input
    assert out <= memory["activations"] <= 2 * out + 16
    assert watch.work.flops == Counter({torch.float32: 2 * 2 * 16 * 64 * 32})


@pytest.mark.oracle
def test_adapters_have_gradients_and_moments_and_their_base_has_none():
    cell = Cell(name="lora", world=8, sizes={}, lora=True)
    whole, adapted = (plan_step(job_of(c)) for c in (Cell(name="", world=8, sizes={}), cell))
    there, here = (plan.ranks[0].memory for plan in (whole, adapted))
    assert here["parameters"] > there["parameters"]
    assert here["optimizer"] < 0.4 * there["optimizer"]
    assert here["gradients"] < 0.4 * there["gradients"]


def reads_its_loss(model, batch):
    loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
    return loss if float(loss.sum) >= 0 else loss + loss


def test_a_number_that_only_computation_gives_is_not_made_up():
    cell = Cell(name="", world=8, sizes={})

    def reading():
        built = setup(cell)
        step = fk.make_step(reads_its_loss, schedule=fk.constant(1e-3))
        return SimpleNamespace(**vars(built) | {"loss_fn": reads_its_loss, "step": step})

    with pytest.raises(PlanError, match=r"the step reads a number .*forgekit plan computes none"):
        plan_step(job_of(cell, setup=reading))


def test_whole_numbers_that_ranks_exchange_are_what_each_would_bring():
    counts = torch.arange(8).view(4, 2)
    with pretending(2, 4, Told()):
        arriving, everyone = (
            torch.empty_like(counts),
            [torch.empty_like(counts[0]) for _ in range(4)],
        )
        dist.all_to_all_single(arriving, counts)
        dist.all_gather(everyone, counts[2])
        total = counts.clone()
        dist.all_reduce(total)
        with pytest.raises(
            PlanError, match=r"scatter_.default exchanges numbers .* what other ranks bring"
        ):
            dist.scatter(counts[0], src=0)
        stand_in = torch.empty(4)
        dist.all_reduce(stand_in)
        with pytest.raises(DataDependentOutputException):
            stand_in.sum().item()
    assert arriving.tolist() == [[4, 5]] * 4
    assert torch.stack(everyone).tolist() == [[4, 5]] * 4
    assert torch.equal(total, 4 * counts)


def test_the_first_error_is_the_real_runs():
    cell = Cell(
        name="",
        world=2,
        sizes={"cp": 2},
        heads=3,
        kv_heads=1,
        options={"context_parallel": "ulysses"},
    )
    with pytest.raises(ValueError, match="query heads") as planned:
        plan_step(job_of(cell))
    with pytest.raises(AssertionError) as real:
        run_ranks(run_cell, 2, cell)
    assert f"ValueError: {planned.value}" in str(real.value)


def test_time_of_a_collective_by_hand():
    h100 = MACHINES["h100"]
    inside = Call("all_gather", tuple(range(8)), 8 * 10**9)
    expected = 3 * LATENCY_NODE_S + 7e9 / (LINKS * h100.link_bandwidth)
    assert seconds_of(h100, 8, inside) == pytest.approx(expected)
    across = Call("all_gather", tuple(range(0, 64, 8)), 8 * 10**9)  # one device of each node
    assert seconds_of(h100, 8, across) > 7e9 / h100.network_bandwidth
    assert seconds_of(h100, 8, Call("all_reduce", (0,), 10**9)) == 0


def test_layouts_of_a_sweep_fill_the_world():
    found = list(layouts(fk.MeshSpec(ep=2), 16, node_size=4))
    assert len(found) == len(set(found)) > 5
    for spec in found:
        assert spec.pp * spec.dp_replicate * spec.dp_shard * spec.tp == 16
        assert spec.tp <= 4
        assert spec.dp_shard % 2 == 0


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
    assert found["layout"] == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 4,
        "cp": 1,
        "tp": 2,
        "ep": 1,
    }
    assert (found["world"], found["device"], found["fits"]) == (8, "h200", True)
    assert found["targets_per_step"] == 16 * 32
    assert found["parameters"] == found["active_parameters"]
    assert 0 < found["mfu"] < 1
    speed = found["targets_per_step"] / found["step_seconds"] / 8
    assert found["tokens_per_second_per_device"] == pytest.approx(speed)
    assert found["flops_per_step"] > 6 * 0.8 * found["parameters"] * found["targets_per_step"]
    (rank,) = found["ranks"]
    assert rank["rank"] == rank["pp"] == 0
    assert set(rank["memory"]) == {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "temporary",
        "peak",
    }
    assert {"op", "dimension", "count", "bytes"} == set(found["collectives"][0])
    assert {c["dimension"] for c in found["collectives"]} == {"tp", "dp_shard", "dp_shard+tp"}
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_says_what_would(capsys):
    sizes = ("model.dim=8192", "model.layers=3", "model.ffn_dim=8192", "model.vocab_size=64")
    rows = ("data.seq_len=4096", "model.max_seq_len=4096", "batch_size=16", "global_batch_size=16")
    code, said = plan(capsys, "pretrain", *sizes, *rows, "--device", "a100")
    assert code == 0, said.err
    assert "DOES NOT FIT" in said.out
    assert re.search(r"activation_checkpoint=full batch_size=1: [\d.]+ GiB, fits", said.out)


@pytest.mark.oracle
def test_a_sweep_ranks_layouts(capsys):
    sizes = (*TINY, "model.tied=false", "batch_size=2", "global_batch_size=8")
    code, said = plan(capsys, "pretrain", *sizes, "--world", 2, "--sweep", "--json")
    assert code == 0, said.err
    found = json.loads(said.out)
    assert [sum(n - 1 for n in one["layout"].values()) for one in found] == [1] * 3
    assert "pp=2 tp=2" not in said.err
    assert [p["step_seconds"] for p in found] == sorted(p["step_seconds"] for p in found)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["pretrain", "--device", "h300"], 'is one of "a100", "h100", "h200", "b200"'),
        (["pretrain", "--world", "0"], "--world 0: it must be at least 1"),
        (["pretrain", "--node-size", "-1"], "--node-size -1: it must be at least 1"),
        (["pretrain", "--world", "6", "mesh.tp=4"], "--world 6: tp 4: 6 ranks are not divisible"),
        (["pretrain", "--world", "4", "mesh.dp_shard=3"], "--world 4: dp_shard 3 = 3 does not fit"),
        (["pretrian"], "no recipe 'pretrian'; the nearest is 'pretrain'"),
        (["minimal"], "has no Config, setup; a recipe that this command can set up"),
        (["gone.py"], "gone.py is not there; name a recipe's file"),
        (["pretrain", "model.dime=3"], "model.dime"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_refused_with_what_to_do(capsys, arguments, match):
    try:
        code = main(["plan", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert match in capsys.readouterr().err


@pytest.mark.oracle
def test_seven_billion_on_1024_ranks_take_a_minute_and_two_gib():
    code = (
        "import resource, sys, time; from forgekit.cli.program import main;"
        "began = time.process_time(); assert main(sys.argv[1:]) == 0;"
        "print(time.process_time() - began,"
        " resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    sizes = "vocab_size=32000 dim=4096 layers=32 heads=32 kv_heads=32 ffn_dim=11008"
    sizes = [f"model.{size}" for size in (*sizes.split(), "max_seq_len=4096", "tied=false")]
    run = [*sizes, "data.seq_len=4096", "mesh.tp=8", "precision=bf16", "batch_size=1"]
    run += ["global_batch_size=1024", "--world=1024", "--device=h100", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "pretrain", *run],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["parameters"] == 6_738_415_616
    seconds, kib = map(float, done.stderr.split()[-2:])
    assert seconds <= 60
    assert kib <= 2 * 2**20
