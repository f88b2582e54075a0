"""Losses of streamed rollouts in every layout, against the full batch in float64."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from covering import in_turn
from lab import SPEC, full, relative_error
from pool import RankError, run_again, run_ranks
from rollouts.answers import build_state
from torch import Tensor, nn

import forgekit as fk
from forgekit.rollouts import losses
from forgekit.rollouts.batch import join_rollouts
from forgekit.rollouts.stream import RolloutStream

WIDTH = 16
EVEN = attrs.evolve(SPEC, vocab_size=40)
SPECS = {"dense": EVEN, "routed": attrs.evolve(EVEN, moe=fk.MoESpec(experts=4, top_k=2, ffn_dim=8))}
LAYOUTS: dict[str, tuple[int, dict[str, int], str]] = {
    "one": (1, {}, "dense"),
    "dp2": (2, {"dp_shard": 2}, "dense"),
    "dp4": (4, {"dp_shard": 4}, "dense"),
    "tp2": (2, {"dp_shard": 1, "tp": 2}, "dense"),
    "pp2": (2, {"dp_shard": 1, "pp": 2}, "dense"),
    "cp2": (2, {"dp_shard": 1, "cp": 2}, "dense"),
    "ep2": (2, {"dp_shard": 2, "ep": 2}, "routed"),
}
LOSSES: dict[str, Any] = {
    "grpo": partial(losses.grpo_loss, clip=0.02, kl=losses.KL(0.2)),
    "dr_grpo": partial(losses.dr_grpo_loss, max_length=9),
    "dapo": losses.dapo_loss,
    "masked": partial(
        losses.ppo_loss,
        clip=0.02,
        kl=losses.KL(0.2, "k2", ratio=True),
        correction=losses.ImportanceCorrection(1.02, "mask"),
    ),
    "gspo": partial(losses.gspo_loss, clip=0.02),
    "cispo": partial(losses.cispo_loss, most=1.02),
}
SPLITS = {"1": 1, "3": 3, "ragged": 2}
"""Messages of a micro-batch; the last one of "ragged" is not full."""
KINDS = ("full", "empty_rank")
COUNT = 5


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def message_of(number: int) -> dict[str, Any]:
    """Two answers of ragged lengths, tokens masked inside, the second one now and then wholly.

    Beside them one without a token, of a group of its own.
    """
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, 6, (2,), generator=draw).tolist()
    prompt, *new = torch.randint(40, (2 + sum(lengths),), generator=draw).split([2, *lengths])
    trained = [torch.rand(len(one), generator=draw) < 0.7 for one in new]
    return {
        "prompts": [*[prompt] * 2, prompt[: 1 + number % 2]],
        "ids": [*(torch.cat([prompt, one]) for one in new), prompt[: 1 + number % 2]],
        "log_probs": [*(-3.7 + 0.1 * drawn(len(one), seed=number) for one in new), []],
        "rewards": drawn(3, seed=number + 50).tolist(),
        "groups": torch.tensor([0, 0, 1]),
        "trained": [*trained, None],
    }


def with_reference(messages: Any) -> Any:
    # A pipeline needs as many rows in each micro-batch, and elsewhere there are some of padding.
    batch = join_rollouts(messages, pad_to=WIDTH, rows=3)
    noise = (batch["input_ids"] * 7 + batch["labels"] * 3) % 11  # of the tokens alone
    batch["reference"] = batch["log_probs"] + 0.05 * noise
    batch["old_log_probs"] = batch["log_probs"] + 0.01 * (noise - 5)
    return batch


def log_probs_of(model: nn.Module, batch: Any) -> Tensor:
    head = partial(fk.linear_log_probs, labels=batch["labels"])
    places = {key: batch[key] for key in ("position_ids", "doc_ids")}
    return model(batch["input_ids"], head=head, **places)


def rank_messages(data: int, world: int, kind: str) -> list[Any]:
    if kind == "empty_rank" and data == world - 1 > 0:
        return []
    return [message_of(number) for number in range(COUNT * data, COUNT * (data + 1))]


def expected_gradients(model: nn.Module, messages: list[Any], name: str) -> dict[str, Tensor]:
    """One message at a time and one plain backward, from the formulas; nothing of the package."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for message, answer in itertools.product(messages, range(2)):
        rewards = torch.tensor(message["rewards"][:2], dtype=torch.float64)
        apart = (rewards - rewards.mean()) / rewards.std(correction=0)
        ids, kept = message["ids"][answer], message["trained"][answer]
        if not kept.any():
            continue
        likely = model(ids[None, :-1])[0].log_softmax(-1)
        new = likely.gather(1, ids[1:, None])[1:, 0][kept]
        old = message["log_probs"][answer].float().double()[kept]
        noise = ((ids[1:-1] * 7 + ids[2:] * 3) % 11)[kept]
        if name == "masked":  # the trainer's own, less likely by up to 5% than the sampler's
            sampled, old = old, (old + 0.01 * (noise - 5).float()).float().double()
        ratio, weight = (new - old).exp(), apart[answer]
        if name == "gspo":
            ratio = (new - old).mean().exp() * torch.ones_like(new)
        low, high = {"dapo": (0.8, 1.28), "dr_grpo": (0.8, 1.2)}.get(name, (0.98, 1.02))
        terms = -torch.minimum(ratio * weight, ratio.clamp(low, high) * weight)
        if name == "cispo":
            terms = -ratio.clamp(max=1.02).detach() * weight * new
        if name == "masked":
            factor = (old - sampled).exp()
            terms = terms * torch.where(factor <= 1.02, factor, 0.0)
            moved = new - (sampled + 0.05 * noise.float()).float().double()
            terms = terms + 0.2 * ratio * moved.square() / 2
        if name == "grpo":
            moved = new - (old + 0.05 * noise.float()).float().double()
            terms = terms + 0.2 * ((-moved).exp() - 1 + moved)
        of_tokens = name in ("dapo", "cispo", "masked")
        divisor = {"dr_grpo": 9}.get(name, len(new)) if not of_tokens else 1
        total, count = total + terms.sum() / divisor, count + (len(new) if of_tokens else 1)
    (total / count).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def build(kind: str) -> nn.Module:
    return fk.Transformer(SPECS[kind], seed=1).double()


def gradients_job(
    rank: int, world: int, layout: str, name: str, split: str, kind: str, audit: bool = False
) -> Any:
    _, sizes, spec = LAYOUTS[layout]
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu") if world > 1 else None
    messages, size = rank_messages(*fk.data_ranks(mesh), kind), SPLITS[split]
    stream = RolloutStream(messages, size, to_batch=with_reference, mesh=mesh)
    state = build_state(stream, mesh, build(spec))

    def loss(model: Any, batch: Any) -> fk.Loss:
        return LOSSES[name](log_probs_of(model, batch), batch)

    group = next(fk.groups(stream, -(-COUNT // size), end=stream))
    if audit:
        fk.audit(state, next(iter(group)), loss)
    totals = fk.reduce_totals(fk.accumulate(state, group, loss), state)
    pairs = [("metrics", f"rollout/{name}") for name in ("reward", "length")]
    means = [float(totals[*pair, "sum"] / totals[*pair, "count"]) for pair in pairs]
    gradients = {name: full(one) for name, one in fk.gradients(state, totals).items()}
    return gradients, means


def cells() -> list[Any]:
    """All that can be; by default each layout with another loss, and each loss once."""
    every = in_turn([*LAYOUTS], [*LOSSES], [*SPLITS], KINDS)
    return [cell for cell in every if cell.values[:2] != ("cp2", "gspo")]


@pytest.mark.parametrize(("layout", "name", "split", "kind"), cells())
def test_gradients_are_those_of_the_full_batch(layout, name, split, kind):
    world, sizes, spec = LAYOUTS[layout]
    datas = sizes.get("dp_shard", 1)
    parts = run_again(gradients_job, world, layout, name, split, kind)
    found = {n: gradient for part, _ in parts for n, gradient in part.items()}
    messages = sum((rank_messages(d, datas, kind) for d in range(datas)), [])  # noqa: RUF017
    assert relative_error(found, expected_gradients(build(spec), messages, name)) < 1e-10
    rewards = [reward for message in messages for reward in message["rewards"]]
    lengths = [int(sum(kept)) for message in messages for kept in message["trained"][:2]]
    wanted = [sum(rewards) / len(rewards), sum(lengths) / len(rewards)]
    assert all(means == pytest.approx(wanted, abs=1e-7) for _, means in parts)


def test_ranks_with_slices_of_sequences_cannot_take_one_ratio_of_each():
    with pytest.raises(RankError, match="positions"):
        run_ranks(gradients_job, 2, "cp2", "gspo", "3", "full", True)
