"""Resuming elsewhere: on another number of ranks, and on other data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab import full_tensors, logits_loss
from pool import run_ranks
from runs import arguments, rows_of, run_here, saved_step, status_of

import forgekit as fk

SEED, SEQ_LEN, ROWS, GLOBAL_BATCH = 3, 8, 60, 12

STRETCHES = [
    (2, {"dp_replicate": 2, "dp_shard": 1}, 3, 3),
    (3, {}, 4, 8),
    (1, {}, 6, 11),
]
"""Ranks, layout, rows per rank and micro-batch, step to stop at. An epoch is five steps."""


@pytest.fixture
def numbered(tmp_path):
    """A token file whose rows say which they are: token ``t`` stands at place ``t``."""
    last = ROWS * SEQ_LEN
    return fk.write_tokens(
        tmp_path / "tokens", [np.arange(last)], vocab_size=last + 1, eos_id=last
    ).path


def build(mesh, vocabulary):
    spec = fk.TransformerSpec(
        vocab_size=vocabulary + 1,
        dim=32,
        layers=2,
        heads=4,
        kv_heads=2,
        ffn_dim=48,
        max_seq_len=SEQ_LEN,
    )
    # In float64: Adam divides by tiny moments, so that float32 sums in another order drift apart.
    model = fk.Transformer(spec, seed=SEED).double()
    if mesh is not None:
        model = fk.parallelize(model, mesh)
    return fk.TrainState.create(model, fk.adamw(model, weight_decay=0.1), mesh=mesh, seed=SEED)


def noting(batches, rows):
    """Pass micro-batches on, noting their rows."""
    for batch in batches:
        rows += (batch["input_ids"][:, 0] // SEQ_LEN).tolist()
        yield batch


def train(mesh, tokens, checkpoints, batch_size, until):
    """Resume, train and save.

    Returns:
        What this rank saw: for each step the rows and the loss, and all parameters in the end.
    """
    dataset = fk.token_dataset(tokens, SEQ_LEN)
    state = build(mesh, ROWS * SEQ_LEN)
    state = fk.checkpoint_load(state, checkpoints, fingerprint=dataset.fingerprint)
    rank, world = fk.data_ranks(mesh)
    loader = fk.make_loader(
        dataset, batch_size, seed=SEED, start=state.samples, rank=rank, world=world
    )
    step = fk.make_step(logits_loss, schedule=fk.warmup_cosine(1e-2, warmup=2, total=20))
    seen = {}
    groups = fk.groups(loader, loader.micro_batches(GLOBAL_BATCH))
    while state.step < until:
        rows = []
        state, metrics = step(state, noting(next(groups), rows))
        assert state.samples == state.step * GLOBAL_BATCH == loader.samples
        seen[state.step] = (rows, metrics["loss"].item())
    fk.checkpoint_save(state, checkpoints, fingerprint=dataset.fingerprint).wait()
    return seen, full_tensors(state.model)


def _train_ranks(rank, world, sizes, *rest):
    return train(fk.build_mesh(fk.MeshSpec(**sizes), device="cpu"), *rest)


def test_a_run_moves_between_numbers_of_ranks_and_sees_each_sample_once(tmp_path, numbered):
    _, _, _, steps = STRETCHES[-1]
    expected, parameters = train(None, numbered, tmp_path / "straight", GLOBAL_BATCH, steps)
    moved = {}
    for world, sizes, batch_size, until in STRETCHES:
        stretch = (sizes, numbered, tmp_path / "moved", batch_size, until)
        parts = run_ranks(_train_ranks, world, *stretch)
        for step in parts[0][0]:
            assert step not in moved
            rows = [row for seen, _ in parts for row in seen[step][0]]
            losses = {seen[step][1] for seen, _ in parts}
            assert len(losses) == 1
            moved[step] = rows, losses.pop()
    assert list(moved) == list(expected) == list(range(1, steps + 1))

    for step, (rows, loss) in moved.items():
        samples = np.arange(GLOBAL_BATCH) + (step - 1) * GLOBAL_BATCH
        assert sorted(rows) == sorted(expected[step][0])
        assert sorted(rows) == sorted(fk.data.sample_rows(samples, ROWS, SEED).tolist())
        assert loss == pytest.approx(expected[step][1], rel=1e-9)
    for epoch in (range(1, 6), range(6, 11)):
        assert sorted(row for step in epoch for row in moved[step][0]) == list(range(ROWS))
    found = parts[0][1]
    assert found.keys() == parameters.keys()
    for name, tensor in parameters.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def test_other_data_is_refused_and_nothing_is_lost(tmp_path, tokens, capsys):
    out = tmp_path / "run"
    given = {"data__path": tokens, "optim__warmup": 2}
    run_here("pretrain", arguments(out=out, steps=4, **given))
    metrics = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        run_here("pretrain", arguments(out=out, steps=8, data__seq_len=8, **given))
    shown = capsys.readouterr().err
    assert "was saved while training on other data" in shown
    assert "Choose another run directory" in shown
    assert status_of(out)["status"] == "failed"
    assert "on other data" in status_of(out)["reason"]
    assert (out / "metrics.jsonl").read_bytes() == metrics
    assert saved_step(out) == 4
    run_here("pretrain", arguments(out=out, steps=8, **given))
    assert [row["step"] for row in rows_of(out)] == list(range(1, 9))
    assert status_of(out)["status"] == "finished"
