"""Small answers, a policy of one table, and steps on a stream of them."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

import forgekit as fk
from forgekit.rollouts.losses import dapo_loss
from forgekit.rollouts.stream import RolloutStream

VOCABULARY = 8


def message(number: int, version: int = 0, answers: int = 2, **changes: Any) -> dict[str, Any]:
    """Answers of ragged lengths to one prompt, which holds the number in base 8."""
    prompt = [number // 64 % 8, number // 8 % 8, number % 8]
    draw = torch.Generator().manual_seed(number)
    new = [torch.randint(VOCABULARY, (1 + n,), generator=draw).tolist() for n in range(answers)]
    return {
        "prompts": [prompt] * answers,
        "ids": [prompt + one for one in new],
        "log_probs": [[-2.0] * len(one) for one in new],
        "rewards": [float(n) for n in range(answers)],
        "versions": version,
        **changes,
    }


def numbers(batch: TensorDictBase) -> list[int]:
    """The messages in a micro-batch, by the prompts of their first answers."""
    found = []
    for ids, documents in zip(batch["input_ids"].tolist(), batch["doc_ids"].tolist(), strict=True):
        starts = [n for n, d in enumerate(documents) if d >= 0 and documents.index(d) == n]
        found += [ids[n] * 64 + ids[n + 1] * 8 + ids[n + 2] for n in starts]
    return list(dict.fromkeys(found))


class Policy(nn.Module):
    """Logits of the next token, by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def loss_fn(model: nn.Module, batch: TensorDictBase) -> fk.Loss:
    labels = batch["labels"].clamp(min=0)
    log_probs = model(batch["input_ids"]).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return dapo_loss(log_probs, batch)


@attrs.frozen(kw_only=True, slots=True, eq=False)
class State(fk.TrainState):
    stream: RolloutStream = attrs.field(repr=False)


def build_state(stream: RolloutStream, mesh: Any = None, model: nn.Module | None = None) -> State:
    model = model or Policy()
    if mesh is not None:
        model = fk.parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return State.create(model, optimizer, mesh=mesh, stream=stream)


def spoiling(is_bad: Any, seen: list[Any]) -> Any:
    """A loss that is NaN where ``is_bad`` of the messages, which it notes."""

    def loss(model: Any, batch: Any) -> fk.Loss:
        seen.append(numbers(batch))
        found = loss_fn(model, batch)
        factor = torch.nan if is_bad(seen[-1]) else 1.0
        return fk.Loss(found.sum * factor, found.count, found.metrics)

    return loss


def train(
    stream: RolloutStream,
    micro_batches: int = 1,
    loss: Any = loss_fn,
    *,
    state: State | None = None,
    steps: int | None = None,
    saved: bool = False,
    **options: Any,
) -> State:
    """Steps on a stream, each of them committed, up to its end or so many."""
    state = build_state(stream) if state is None else state
    step = fk.make_step(loss, schedule=fk.constant(0.1), end=stream, **options)
    for group in itertools.islice(fk.groups(stream, micro_batches, end=stream), steps):
        state, _ = step(state, group)
        stream.commit(state, saved=saved)
    return state
