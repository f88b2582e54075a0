"""What FSDP is told: each option leaves the gradient as it is and does what it says."""

from __future__ import annotations

import attrs
import pytest
import torch
from covering import first_of
from lab import (
    SPEC,
    Watch,
    global_batch,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import run_again
from torch.distributed.tensor import DTensor

import forgekit as fk
from forgekit.parallel.fsdp import fsdp_modules, shard

LAYERS = 4
DEEP = attrs.evolve(SPEC, layers=LAYERS, vocab_size=38)  # which tp 2 divides
IDS = torch.randint(0, SPEC.vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))
LAYOUTS = {
    "fsdp 2": (2, {}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "fsdp 4": (4, {}),
}
OPTIONS = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "neighbours": {"reshard_after_forward": 2},
    "offload": {"cpu_offload": True},
}


@pytest.fixture
def mesh():
    yield fk.build_mesh(device="cpu")
    fk.shutdown()


def _sharded(sizes, dtype=torch.float32, **options):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    return fk.parallelize(fk.Transformer(DEEP).to(dtype), mesh, **options), mesh


# The gradient


def _gradients(rank, world, sizes, sync, options):
    model, mesh = _sharded(sizes, torch.float64, **options)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.0), sync=sync)
    # The second step meets whatever the first one left gathered.
    state, _ = step(state, [row[rank] for row in global_batch(world, seed=1)])
    return mean_gradients(state, [row[rank] for row in global_batch(world)], logits_loss)


MODES = (("hsdp 2x2", "last"), ("fsdp 4", "every"), ("hsdp 2x2", "hsdp_last"))
ON_TWO = [("fsdp 2", "last", option) for option in OPTIONS]
ON_FOUR = [("hsdp 2x2", "hsdp_last", "keep")]
ALL = ((*mode, option) for mode in MODES for option in OPTIONS)


@pytest.mark.parametrize(("layout", "sync", "option"), first_of(ON_TWO + ON_FOUR, [*ON_TWO, *ALL]))
def test_no_option_changes_the_gradient(layout, sync, option):
    world, sizes = LAYOUTS[layout]
    expected, _ = reference_gradients(fk.Transformer(DEEP), global_batch(world))
    for found in run_again(_gradients, world, sizes, sync, OPTIONS[option]):
        assert relative_error(found, expected) < 1e-10


# Resharding


def _gathered(rank, world):
    """Of a block's weight what forward keeps, and gathers and collectives, by option."""
    counted = {}
    for reshards in (True, 2, False):
        model, _ = _sharded({}, reshard_after_forward=reshards)
        with Watch() as forward:
            logits = model(IDS)
        kept = model.layers[1].attention.query.weight
        with Watch() as backward:
            logits.sum().backward()
        local = kept.to_local() if isinstance(kept, DTensor) else kept
        gathers = [calls.count("allgather") for calls in (forward, backward)]
        counted[reshards] = local.numel() / kept.numel(), *gathers, len(backward.collectives)
    return counted


def test_resharding_decides_what_stays_and_what_backward_gathers():
    """The root stays gathered in each: backward begins with it."""
    root = LAYERS + 1
    for found in run_again(_gathered, 4):
        assert found == {
            True: (1 / 4, root, LAYERS, LAYERS + root),
            2: (1 / 2, root, LAYERS, LAYERS + root),
            False: (1, root, 0, root),
        }


# Prefetch


def _ahead(rank, world):
    """All-gathers issued by the time each block computes, in forward and in backward."""
    model, _ = _sharded({})
    model(IDS).sum().backward()  # FSDP learns the order in which modules run
    forward, backward = [], []
    note = lambda _: backward.append(gathers.count("allgather"))  # noqa: E731
    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: forward.append(gathers.count("allgather")))
        block.register_forward_hook(lambda _m, _a, out: out.register_hook(note) and None)
    with Watch() as gathers:
        logits = model(IDS)
    with Watch() as gathers:
        logits.sum().backward()
    return forward, backward


def test_one_block_is_gathered_ahead():
    """With the root's own parameters the first block is the second to be gathered."""
    for ahead in run_again(_ahead, 2):
        assert ahead == ([3, 4, 5, 5], [2, 3, 4, 4])


# Deferred all-reduce


def _collectives(rank, world):
    """Reduce-scatters and all-reduces of each FSDP module in a step, by mode."""
    model, mesh = _sharded({"dp_replicate": 2, "dp_shard": 2})
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    batches, modules = [row[rank] for row in global_batch(world)], len(fsdp_modules(model))
    counted = {}
    for sync in ("last", "every", "hsdp_last"):
        with Watch() as calls:
            fk.accumulate(state, batches, logits_loss, sync=sync, audit=False)
        words = ("reduce_scatter", "allreduce")
        counted[sync] = tuple(calls.count(word) / modules for word in words)
    return counted


def test_hsdp_last_defers_the_sum_over_replicas():
    for found in run_again(_collectives, 4):
        assert found == {"last": (1, 1), "every": (3, 3), "hsdp_last": (3, 1)}


# Precision of pipeline stages


def test_only_the_last_of_several_roots_casts_its_output(mesh):
    first, last = stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    shard(stages, [], mesh["dp_shard"], "bf16", inner=[first])
    passed_on = first(torch.ones(1, 4))
    assert passed_on.dtype == torch.bfloat16
    assert last(passed_on).dtype == torch.float32


# Errors


def _refused(rank, world):
    with pytest.raises(ValueError, match=r"^reshard_after_forward=2 needs all 4 ranks on dp_repl"):
        _sharded({"tp": 2}, reshard_after_forward=2)


def test_groups_of_neighbours_need_all_ranks():
    run_again(_refused, 4)


def test_a_block_that_is_no_part_of_a_root_is_not_prefetched(mesh):
    """Stages of one rank share the list of blocks; none may gather another's."""
    stages = [torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2))) for _ in range(2)]
    blocks = [block for stage in stages for block in stage]
    shard(stages, blocks, mesh["dp_shard"], "fp32")
    for stage in stages:
        ahead = stage[0]._get_fsdp_state()._states_to_forward_prefetch
        assert ahead == [stage[1]._get_fsdp_state()]
