"""The step on models and habits that are not ours: what users bring must not break the gradient."""

from __future__ import annotations

import attrs
import pytest
import torch
from lab import (
    SPEC,
    build_state,
    full_tensors,
    global_batch,
    logits_loss,
    reference_gradients,
    relative_error,
)
from ranks import run_again, run_ranks
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import fully_shard

import forgekit as fk


def _corrected(state, batches, loss_fn=logits_loss):
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    factor = fk.clip(totals).factor
    return {n: g * factor for n, g in full_tensors(state.model, gradients=True).items()}


def _batches(rank, world, seed=0):
    return [row[rank] for row in global_batch(world, seed=seed)]


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, head):
        return (self.a if head == 0 else self.b)(self.body(x))


def _two_heads_loss(model, batch):
    return fk.Loss(model(batch["x"], int(batch["head"][0])).square().sum(), len(batch))


def _head_batch(rank):
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + rank
    return TensorDict({"x": x, "head": torch.full((2,), rank)}, [2])


def _different_heads(rank, world):
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(_TwoHeads().double(), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    return _corrected(state, [_head_batch(rank)], _two_heads_loss)


def test_parameters_that_one_rank_does_not_use_get_their_own_gradient():
    model = _TwoHeads().double()
    state = fk.TrainState.create(model, fk.adamw(model))
    expected = _corrected(state, [_head_batch(0), _head_batch(1)], _two_heads_loss)
    for found in run_again(_different_heads, 2):
        assert relative_error(found, expected) < 1e-12


def _wrapped_by_the_user(rank, world):
    mesh = fk.build_mesh(device="cpu")
    model = fully_shard(fk.Transformer(SPEC).double(), mesh=mesh["dp_shard"])
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    return _corrected(state, _batches(rank, world))


def test_a_model_that_the_user_wrapped_in_fsdp_sums_too():
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(2))
    for found in run_ranks(_wrapped_by_the_user, 2):
        assert relative_error(found, expected) < 1e-10


def test_the_first_step_of_fused_momentum_may_be_bad():
    """The buffer is made from unwritten memory, and a skip leaves it so."""
    results = []
    for fused in (True, False):
        model = fk.Transformer(SPEC)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=fused)
        state = fk.TrainState.create(model, optimizer)
        bad = fk.make_step(
            lambda m, b: fk.Loss(logits_loss(m, b).sum * float("nan"), 1),
            schedule=fk.constant(0.1),
        )
        step = fk.make_step(logits_loss, schedule=fk.constant(0.1))
        state, _ = bad(state, _batches(0, 1))
        for _ in range(3):
            state, _ = step(state, _batches(0, 1))
        results.append(full_tensors(state.model))
    assert relative_error(*results) < 1e-6


def _lost_metric(rank, world):
    state = build_state({}, world)

    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        if rank == 1 and state.step == 1:
            return loss
        return fk.Loss(loss.sum, loss.count, {"extra": (1.0, 1)})

    step = fk.make_step(loss_fn, schedule=fk.constant(0.1))
    state, _ = step(state, _batches(rank, world))
    before = full_tensors(state.model)
    match = r"changed: missing \['metrics.extra.count'"
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=match) as raised:
        step(state, _batches(rank, world))
    assert rank == 1 or "rank 1 could not take a step" in str(raised.value)
    return relative_error(full_tensors(state.model), before)


def test_a_metric_that_is_lost_on_one_rank_is_refused_on_all():
    assert run_ranks(_lost_metric, 2, timeout_s=20) == [0.0, 0.0]


def _other_evaluation_names(rank, world):
    state = build_state({}, world)

    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        return fk.Loss(loss.sum, loss.count, {f"source {rank}": (1.0, 1)})

    with pytest.raises(ValueError, match="rank 1 reports other sums than rank 0"):
        fk.evaluate(state, _batches(rank, world), loss_fn)


def test_evaluation_refuses_ranks_with_different_metrics():
    run_ranks(_other_evaluation_names, 2)


def _uneven_rows(rank, world):
    state = build_state({}, world)
    batches = [batch[: 1 + rank] for batch in _batches(rank, world)]
    with pytest.raises(ValueError, match=r"rank 1 counts 12 samples in a step and rank 0 6"):
        fk.reduce_totals(fk.accumulate(state, batches, logits_loss), state)


def test_ranks_with_different_numbers_of_rows_are_refused():
    run_ranks(_uneven_rows, 2)


class _Lying(list):
    def __len__(self):
        return 4


def test_a_length_that_is_not_kept_is_refused():
    with pytest.raises(ValueError, match=r"_Lying has a len\(\) of 4 and yielded 3"):
        fk.accumulate(build_state({}, 1), _Lying(_batches(0, 1)), logits_loss)


def test_counting_ahead_keeps_what_padding_counts():
    padded = fk.groups(fk.make_loader(_Rows(), batch_size=2, epochs=1), 2)
    state = build_state({}, 1)
    samples = []
    for group in padded:
        batches, _ = fk.count_ahead(state, group, {"rows": len})
        samples.append(fk.accumulate(state, batches, logits_loss).samples)
    assert samples == [4, 1]


class _Rows:
    def __len__(self):
        return 5

    def __getitem__(self, row):
        ids = torch.arange(4) + row
        return TensorDict({"input_ids": ids, "labels": ids}, [])


def test_sixteen_bit_parameters_keep_a_factor_near_one():
    model = nn.Linear(64, 1, bias=False).bfloat16()
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), loss_scale=1.0)
    gradient = torch.linspace(0.5, 1.5, 64).bfloat16()[None]
    model.weight.grad = gradient.clone()
    before = model.weight.detach().clone()
    totals = fk.Totals.of(targets=1.0, loss=1.0, grad_sq=0.0, loss_scale=1.0)
    factor = torch.tensor(0.999, dtype=torch.float64)
    correction = fk.Correction(factor, factor, torch.tensor(True))
    fk.update(state, correction, lr=0.0, totals=totals)
    assert torch.equal(model.weight.grad, (gradient.float() * 0.999).bfloat16())
    assert torch.equal(model.weight, before)


class _Positions(nn.Module):
    """Adds a float32 buffer between modules, as many foreign models do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(37, 8)
        self.register_buffer("positions", torch.ones(16, 8))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU())])
        self.output = nn.Linear(8, 37)

    def forward(self, ids):
        h = self.embedding(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


def _foreign_bf16(rank, world):
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(_Positions(), mesh, precision="bf16")
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.01))
    state, metrics = step(state, _batches(rank, world))
    return metrics["skipped"].item()


def test_foreign_models_train_in_bf16():
    assert run_again(_foreign_bf16, 2) == [0.0, 0.0]


@attrs.frozen(kw_only=True)
class _Two(fk.TrainState):
    critic: nn.Module
    critic_optimizer: torch.optim.Optimizer


def _two_optimizers(rank, world, directory):
    mesh = fk.build_mesh(device="cpu")

    def build(seed):
        model, critic = (fk.Transformer(SPEC, seed=s) for s in (seed, seed + 1))
        model, critic = fk.parallelize(model, mesh), fk.parallelize(critic, mesh)
        fields = {"critic": critic, "critic_optimizer": fk.adamw(critic)}
        return _Two.create(model, fk.adamw(model), mesh=mesh, **fields)

    def train_critic(state):
        for parameter in state.critic.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.critic_optimizer.step()

    state = build(0)
    train_critic(state)
    fk.checkpoint_save(state, directory, blocking=True)
    resumed = fk.checkpoint_load(build(5), directory)
    for each in (state, resumed):
        train_critic(each)
    a, b = full_tensors(state.critic), full_tensors(resumed.critic)
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_second_optimizer_resumes_on_several_ranks(tmp_path):
    assert run_again(_two_optimizers, 2, str(tmp_path)) == [True, True]


def _unused(rank, world):
    model = _TwoHeads()
    mesh = None
    if world > 1:
        mesh = fk.build_mesh(device="cpu")
        model = fk.parallelize(model, mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(_two_heads_loss, schedule=fk.constant(0.1))
    for _ in range(3):
        batch = _head_batch(0).float()
        batch["head"] = batch["head"].long()
        state, _ = step(state, [batch])
    return full_tensors(state.model)


def test_an_unused_parameter_is_treated_alike_in_every_layout():
    """Its gradient is zero, not missing: AdamW decays it and counts its steps everywhere."""
    alone = _unused(0, 1)
    for found in run_again(_unused, 2):
        assert relative_error(found, alone) < 1e-5


def _smaller_mesh(rank, world):
    mesh = torch.distributed.device_mesh.DeviceMesh(
        "cpu", torch.tensor([0, 1]), mesh_dim_names=("dp_shard",)
    )
    if rank < 2:
        with pytest.raises(ValueError, match="the mesh has 2 ranks and the world 3"):
            fk.parallelize(nn.Linear(1, 1), mesh)


def test_a_mesh_that_is_smaller_than_the_world_is_refused():
    run_ranks(_smaller_mesh, 3)


def _penalty(model, batch):
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return fk.Loss(out.square().sum() + slope.square().sum(), len(x))


def _finite_differences(model, batch):
    moved = batch["x"] + 0.1
    return fk.Loss((model(moved) - model(batch["x"])).square().sum(), len(moved))


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _with_penalty(rank, world, options):
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    model = fk.parallelize(_Blocks().double(), mesh, **options)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    batch = TensorDict({"x": torch.full((3, 4), 1.0 + rank, dtype=torch.float64)}, [3])
    with pytest.raises(ValueError, match="loss_fn differentiates through the model itself"):
        fk.accumulate(state, [batch, batch], _penalty)
    totals = fk.reduce_totals(fk.accumulate(state, [batch], _finite_differences), state)
    factor = fk.clip(totals, max_norm=float("inf")).factor
    return {n: g * factor for n, g in full_tensors(model, gradients=True).items()}


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["freed", "kept"])
def test_a_gradient_penalty_is_refused_where_parameters_are_sharded(options):
    """With its reason; another loss can be tried then, and on one rank it is exact."""
    rows = torch.cat([torch.full((3, 4), value, dtype=torch.float64) for value in (1.0, 2.0)])
    whole = TensorDict({"x": rows}, [6])

    def gradients(loss_fn):
        model = _Blocks().double()
        state = fk.TrainState.create(model, fk.adamw(model))
        totals = fk.reduce_totals(fk.accumulate(state, [whole], loss_fn), state)
        factor = fk.clip(totals, max_norm=float("inf")).factor
        return {name: p.grad * factor for name, p in model.named_parameters()}

    expected = gradients(_finite_differences)
    for found in run_ranks(_with_penalty, 2, options):
        assert relative_error(found, expected) < 1e-10
    model = _Blocks().double()
    loss = _penalty(model, whole)
    loss.sum.backward()
    reference = {name: p.grad / 6 for name, p in model.named_parameters()}
    assert relative_error(gradients(_penalty), reference) < 1e-12


def test_a_vector_metric_is_refused_and_leaves_no_gradient():
    state = build_state({}, 1)

    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        return fk.Loss(loss.sum, loss.count, {"vector": (torch.ones(2), 1)})

    with pytest.raises(ValueError, match=r"metric of shape \(2,\)"):
        fk.accumulate(state, _batches(0, 1), loss_fn)
    assert all(p.grad is None for p in state.model.parameters())
