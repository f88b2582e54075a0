"""What FSDP is told: each option leaves the gradient as it is and does what it says."""

from __future__ import annotations

import attrs
import pytest
import torch
from lab import (
    SPEC,
    Watch,
    global_batch,
    lay_out,
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
HSDP = {"dp_replicate": 2, "dp_shard": 2}
OPTIONS = ({}, {"reshard_after_forward": False}, {"cpu_offload": True})
MODES = [({}, "last"), ({}, "every"), (HSDP, "hsdp_last")]
CHOSEN = [(HSDP, "hsdp_last", OPTIONS[1]), ({}, "every", OPTIONS[2])]


def _gradients(rank, world, rows):
    found = []
    for sizes, sync, options in rows:
        state = lay_out(fk.Transformer(SPEC).double(), sizes, **options)
        step = fk.make_step(logits_loss, schedule=fk.constant(0.0), sync=sync)
        # The second step meets whatever the first one left gathered.
        state, _ = step(state, [row[rank] for row in global_batch(world, seed=1)])
        batches = [row[rank] for row in global_batch(world)]
        found.append(mean_gradients(state, batches, logits_loss))
    return found


EVERY = [(*mode, options) for mode in MODES for options in OPTIONS]


@pytest.mark.parametrize("rows", [CHOSEN, pytest.param(EVERY, marks=pytest.mark.oracle)], ids=len)
def test_no_option_changes_the_gradient(rows):
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(4))
    for by_row in run_again(_gradients, 4, rows):
        assert all(relative_error(found, expected) < 1e-10 for found in by_row)


def _gathered():
    """Of a block's weight what forward keeps, and gathers and collectives, by option."""
    counted = {}
    for reshards in (True, False):
        model = lay_out(fk.Transformer(DEEP), reshard_after_forward=reshards).model
        with Watch() as forward:
            logits = model(IDS)
        kept = model.layers[1].attention.query.weight
        with Watch() as backward:
            logits.sum().backward()
        local = kept.to_local() if isinstance(kept, DTensor) else kept
        gathers = [calls.count("allgather") for calls in (forward, backward)]
        counted[reshards] = local.numel() / kept.numel(), *gathers, len(backward.collectives)
    return counted


def _ahead():
    """All-gathers issued by the time each block computes, in forward and in backward."""
    model = lay_out(fk.Transformer(DEEP)).model
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


def _reductions(rank, world):
    """Reduce-scatters and all-reduces of each FSDP module in a step, by mode."""
    state = lay_out(fk.Transformer(DEEP), HSDP)
    batches, modules = [row[rank] for row in global_batch(world)], fsdp_modules(state.model)
    counted = {}
    for sync in ("last", "every", "hsdp_last"):
        with Watch() as calls:
            fk.accumulate(state, batches, logits_loss, sync=sync)
        words = ("reduce_scatter", "allreduce")
        counted[sync] = tuple(calls.count(word) / len(modules) for word in words)
    return counted


def _collectives(rank, world):
    root = LAYERS + 1  # stays gathered: backward begins with it
    assert _gathered() == {True: (1 / 4, root, LAYERS, LAYERS + root), False: (1, root, 0, root)}
    # With the root's own parameters the first block is the second to be gathered.
    assert _ahead() == ([3, 4, 5, 5], [2, 3, 4, 4])
    assert _reductions(rank, world) == {"last": (1, 1), "every": (3, 3), "hsdp_last": (3, 1)}


def test_options_decide_what_stays_and_what_is_gathered_and_reduced_when():
    run_again(_collectives, 4)


def test_stages_of_one_rank_pass_on_16_bits_and_gather_no_block_of_another(mesh):
    stages = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))) for _ in range(2)]
    blocks = [block for stage in stages for block in stage]
    shard(stages, blocks, mesh["dp_shard"], "bf16", inner=stages[:1])
    for stage in stages:
        ahead = stage[0]._get_fsdp_state()._states_to_forward_prefetch
        assert ahead == [stage[1]._get_fsdp_state()]
    passed_on = stages[0](torch.ones(1, 4))
    assert passed_on.dtype == torch.bfloat16
    assert stages[1](passed_on).dtype == torch.float32
