"""Losses of several terms on logits that ranks share by the vocabulary, against one process.

People who train with tensor parallelism write distillation, preference and entropy terms on the
logits as they would on one device; each gradient is held to plain torch in float64.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import first_of, in_turn
from lab import SPEC, full_tensors, relative_error
from ranks import run_again
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk
from forgekit.parallel.tensor.sharded_logits import SharedLogits

VOCAB, PLACES, ROWS = 40, 8, 2
WIDE = attrs.evolve(SPEC, vocab_size=VOCAB, dim=32, heads=8, kv_heads=4)


def build(seed: int = 0) -> fk.Transformer:
    model = fk.Transformer(WIDE, seed=seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # logits that are no longer all alike
    return model


def draw_batch(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (ROWS, PLACES + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.randint(0, 10, labels.shape, generator=generator) < 3] = -100
    teacher = torch.randn(ROWS, PLACES, VOCAB, generator=generator, dtype=torch.float64)
    batch = {"input_ids": ids[:, :-1], "labels": labels, "teacher": teacher}
    return TensorDict(batch, batch_size=[ROWS])


def _log_probs(logits: Tensor, batch: Any) -> Tensor:
    """``[b s]``, 0 where there is no target."""
    labels = batch["labels"]
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels != -100, picked, 0.0)


def entropy(logits: Tensor, batch: Any) -> Tensor:
    log_p = logits.log_softmax(-1)
    each = -(log_p.exp() * log_p).sum(-1)
    return torch.where(batch["labels"] != -100, each, 0.0).sum()


def categorical(logits: Tensor, batch: Any) -> Tensor:
    each = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    return (each * (batch["labels"] != -100)).sum()


def kl_to_plain(logits: Tensor, batch: Any, temperature: float = 1.0) -> Tensor:
    teacher = (batch["teacher"] / temperature).log_softmax(-1)
    each = F.kl_div(
        (logits / temperature).log_softmax(-1), teacher, reduction="none", log_target=True
    ).sum(-1)
    return temperature**2 * (each * (batch["labels"] != -100)).sum()


def squares(logits: Tensor, batch: Any) -> Tensor:
    return 0.01 * (logits.square().sum(-1) * (batch["labels"] != -100)).sum()


def log_z(logits: Tensor, batch: Any) -> Tensor:
    return 0.1 * (logits.logsumexp(-1).square() * (batch["labels"] != -100)).sum()


def dpo(logits: Tensor, batch: Any) -> Tensor:
    """Of two rows the first is chosen; the reference is the teacher."""
    margin = _log_probs(logits, batch) - _log_probs(batch["teacher"], batch)
    sums = margin.sum(1)
    return -2 * F.logsigmoid(0.1 * (sums[0] - sums[1]))


def policy_gradient(logits: Tensor, batch: Any) -> Tensor:
    log_p = _log_probs(logits, batch)
    old = _log_probs(batch["teacher"], batch)
    ratio = (log_p - old).clamp(-2, 2).exp()
    advantage = batch["labels"].double() / VOCAB - 0.3
    clipped = ratio.clamp(0.8, 1.2) * advantage
    return torch.where(batch["labels"] != -100, -torch.minimum(ratio * advantage, clipped), 0).sum()


TERMS = {
    "entropy": entropy,
    "categorical": categorical,
    "distillation": kl_to_plain,
    "temperature": partial(kl_to_plain, temperature=2.5),
    "squares": squares,
    "z": log_z,
    "policy gradient": policy_gradient,
}
PER_ROW = {"dpo": dpo}
"""Sums over a row inside a function that is not linear: whole rows on one rank."""

TWO = {
    "tp2": {"tp": 2},
    "tp2, fsdp2": {"tp": 2, "dp_shard": 2},
    "tp2, cp2": {"tp": 2, "cp": 2},
    "pp2, tp2": {"pp": 2, "tp": 2},
}


def mixed(model: Any, batch: Any, term: str, alone: bool) -> fk.Loss:
    logits = model(batch["input_ids"])
    added = {**TERMS, **PER_ROW}[term](logits, batch)
    base = fk.cross_entropy(logits, batch["labels"])
    if alone:
        return fk.Loss(added, base.count)
    return fk.Loss(base.sum + 0.3 * added, base.count, {"added": (added.detach(), base.count)})


def plain(model: nn.Module, batch: Any, term: str, alone: bool) -> Tensor:
    logits = model(batch["input_ids"])
    added = {**TERMS, **PER_ROW}[term](logits, batch)
    base = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return added if alone else base + 0.3 * added


def reference(
    loss: Any, rows: int, micro_batches: int = 1
) -> tuple[dict[str, Tensor], Tensor, nn.Module]:
    model = build()
    total = torch.zeros((), dtype=torch.float64)
    targets = 0
    for seed in range(rows * micro_batches):
        batch = draw_batch(seed)
        targets += int((batch["labels"] != -100).sum())
        total = total + loss(model, batch)
    (total / targets).backward()
    return full_tensors(model, gradients=True), (total / targets).detach(), model


def step_of(layout: dict[str, int], loss: Any, micro_batches: int = 1, **options: Any) -> Any:
    mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
    model = fk.parallelize(build(), mesh, **options)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    row, rows = fk.data_ranks(mesh)
    batches = [draw_batch(micro * rows + row) for micro in range(micro_batches)]
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss), state)
    factor = fk.clip(totals).factor
    found = full_tensors(state.model, gradients=True)
    return {n: g * factor for n, g in found.items()}, totals["loss"] / totals["targets"]


def world_of(layout: dict[str, int]) -> tuple[int, int]:
    world = 1
    for size in layout.values():
        world *= size
    return world, layout.get("dp_shard", 1)


def check(everyone: Any, expected: dict[str, Tensor], loss: Tensor) -> None:
    names = set()
    for found, found_loss in everyone:
        names |= found.keys()
        assert relative_error(found, {name: expected[name] for name in found}) < 1e-10
        torch.testing.assert_close(found_loss, loss, rtol=1e-10, atol=0)
    assert names == expected.keys()


def _mixed(rank, world, layout, term, alone, micro_batches):
    return step_of(layout, partial(mixed, term=term, alone=alone), micro_batches)


@pytest.mark.parametrize(("term", "alone"), in_turn([*TERMS, *PER_ROW], [False, True]))
def test_terms_on_shared_logits_have_the_gradient_of_one_process(term, alone):
    expected, loss, _ = reference(partial(plain, term=term, alone=alone), 1)
    check(run_again(_mixed, 2, {"tp": 2}, term, alone, 1), expected, loss)


# A teacher that is itself shared


def _distilled(model: Any, batch: Any, teacher: nn.Module) -> fk.Loss:
    logits = model(batch["input_ids"])
    with torch.no_grad():
        target = teacher(batch["input_ids"])
    return fk.cross_entropy(logits, batch["labels"]) + _kl(logits, target, batch)


def _kl(logits: Tensor, target: Tensor, batch: Any) -> fk.Loss:
    is_target = batch["labels"] != -100
    each = F.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="none").sum(-1)
    return fk.Loss((each * is_target).sum(), is_target.sum())


def _taught(rank, world, layout, shares, micro_batches):
    teacher: nn.Module = build(seed=5)
    if shares:
        mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
        teacher = fk.parallelize(teacher.requires_grad_(False), mesh)
    return step_of(layout, partial(_distilled, teacher=teacher), micro_batches)


NO_ANSWER = {
    (False, "tp2, cp2"): "loss_fn is no sum over positions",  # a plain teacher sees a slice
    (True, "pp2, tp2"): "this rank holds 1 of 2 pipeline stages .* cannot be called on its own",
}


@pytest.mark.parametrize(
    ("shares", "where"),
    first_of(
        [(False, "tp2"), (True, "tp2, fsdp2")],
        [one for one in itertools.product([False, True], TWO) if one not in NO_ANSWER],
    ),
)
def test_a_teacher_may_be_plain_or_shared(shares, where):
    layout = TWO[where]
    teacher = build(seed=5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["input_ids"])
        target = teacher(batch["input_ids"]).detach()
        base = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return base + _kl(logits, target, batch).sum

    world, rows = world_of(layout)
    micro_batches = layout.get("pp", 1)
    expected, value, _ = reference(loss, rows, micro_batches)
    check(run_again(_taught, world, layout, shares, micro_batches), expected, value)


# A plain output beside shared logits


# Both losses with terms from elsewhere


# Whatever torch offers


TARGETS = torch.tensor([[1, 5, 2], [0, 3, 4]])
OTHER = torch.rand(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ANY: dict[str, Any] = {
    "gather": lambda x: (x.gather(-1, TARGETS[..., None])[..., 0] - x.logsumexp(-1)).sum(),
    "take along": lambda x: torch.take_along_dim(x, TARGETS[..., None], -1).square().sum(),
    "index": lambda x: x[torch.arange(2)[:, None], torch.arange(3), TARGETS].square().sum(),
    "boolean index": lambda x: x[OTHER > 0.5].square().sum(),
    "mean of squares": lambda x: F.mse_loss(x, OTHER),
    "huber": lambda x: F.huber_loss(x, OTHER, delta=0.5),
    "soft margin": lambda x: F.soft_margin_loss(x, (OTHER - 0.5).sign()),
    "norm": lambda x: x.norm(dim=-1).sum(),
    "distance": lambda x: F.pairwise_distance(x, OTHER).sum(),
    "log sigmoid": lambda x: F.logsigmoid(x).mean(),
    "smoothing": lambda x: F.cross_entropy(x[0], TARGETS[0], label_smoothing=0.1),
    "categorical": lambda x: torch.distributions.Categorical(logits=x).log_prob(TARGETS).sum(),
    "operators": lambda x: ((2 * x - x / 3 + (1 - x) ** 2) @ OTHER.mT).sum(),
    "rounded": lambda x: x.float().double().square().sum(),
    "cross entropy": lambda x: fk.cross_entropy(x, TARGETS, 0.1).sum + x.square().mean(),
    "without gradients first": lambda x: x.detach().exp().sum() * x.mean() + _peeked(x) * x.std(),
}


def _peeked(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.amax(-1).sum()


def _any(rank, world, names):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator)
    for name in names:
        wanted = logits.clone().requires_grad_()
        value = ANY[name](wanted.clone())
        value.backward()
        shards = distribute_tensor(logits, mesh, [Shard(-1)], src_data_rank=None).requires_grad_()
        shared = SharedLogits(shards)
        assert (shared.shape, shared.dtype, shared.ndim) == (logits.shape, logits.dtype, 3)
        found = ANY[name](shared)
        assert type(found) is Tensor, name
        found.backward()
        torch.testing.assert_close(found, value, rtol=1e-12, atol=0, msg=name)
        gradient = shards.grad.full_tensor()
        torch.testing.assert_close(gradient, wanted.grad, rtol=0, atol=1e-12, msg=name)


def test_every_function_of_torch_sees_whole_logits():
    run_again(_any, 2, list(ANY))


def _gathered(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(tp=2), device="cpu")
    model = fk.parallelize(build(), mesh)
    logits = model(draw_batch(0)["input_ids"])
    fk.cross_entropy(logits, draw_batch(0)["labels"]).sum.backward()
    untouched = logits._whole is None
    assert logits.full_tensor() is logits.full_tensor()
    return type(logits).__name__, untouched


def test_cross_entropy_gathers_nothing():
    assert run_again(_gathered, 2) == [("SharedLogits", True)] * 2


# A projection that is read while FSDP keeps it in shards


def _early(model: Any, batch: Any) -> fk.Loss:
    weight = model.output.weight
    hidden = model(batch["input_ids"], head=lambda hidden, _weight: hidden)
    return fk.linear_cross_entropy(hidden, weight, batch["labels"])


def _inside(model: Any, batch: Any) -> fk.Loss:
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head)


SHARDED = {
    "fsdp2": ({"dp_shard": 2}, "'dp_shard'"),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 1}, "'dp_replicate', 'dp_shard'"),
    "hsdp, sharded": ({"dp_replicate": 2, "dp_shard": 2}, "'dp_replicate', 'dp_shard'"),
    "cp2": ({"cp": 2}, "'dp_shard_cp'"),
    "tp2": ({"tp": 2}, "'dp_shard', 'tp'"),
    "tp2, fsdp2": ({"tp": 2, "dp_shard": 2}, "'dp_shard', 'tp'"),
    "tp2, hsdp": ({"tp": 2, "dp_replicate": 2, "dp_shard": 1}, "'dp_replicate', 'dp_shard', 'tp'"),
}


def _read_early(rank, world, layout, names):
    mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
    model = fk.parallelize(build(), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    batch = draw_batch(fk.data_ranks(mesh)[0])
    message = (
        rf"^weight is a DTensor over the mesh dimensions {names}; a loss takes shards over 'tp' "
        r"alone\. .* read it inside forward, model\(ids, head=partial\(forgekit\.linear_cross_ent"
    )
    with pytest.raises(ValueError, match=message):
        fk.accumulate(state, [batch], _early)
    assert all(p.grad is None for p in model.parameters())
    totals = fk.reduce_totals(fk.accumulate(state, [batch], _inside), state)
    factor = fk.clip(totals).factor
    return {n: g * factor for n, g in full_tensors(model, gradients=True).items()}


@pytest.mark.parametrize(("layout", "names"), SHARDED.values(), ids=SHARDED)
def test_a_projection_that_is_read_before_the_model_is_called_is_refused(layout, names):
    world, rows = 1, layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    for size in layout.values():
        world *= size

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["input_ids"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")

    expected, _, _ = reference(loss, rows)
    for found in run_again(_read_early, world, layout, names):
        assert relative_error(found, expected) < 1e-10
