"""Small models and losses, right and wrong, that processes of ``verify`` build for themselves.

Each mistake trains without complaint once the library's own check of it is switched off.
"""

from __future__ import annotations

import os
import pkgutil
import re
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from lab import SPEC, alone, lay_out
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk
from forgekit.model.moe_spec import cosine_rate

VOCAB, WIDTH, SEQ, ROWS = 36, 12, 8, 2
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
MOE = fk.MoESpec(
    experts=4, top_k=2, ffn_dim=8, first=1, aux_loss=3.0, z_loss=0.5, bias_rate=cosine_rate(0.2)
)


class Layer(nn.Module):
    """A residual branch; it may take the embedding, or have an activation with a weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.act = nn.PReLU() if kind == "unnamed weight" else nn.GELU()

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        """Of the stream; with the embedding, or a sum, both."""
        out = x + self.down(self.act(self.up(x + more[0] if more and more[0].ndim else x)))
        passed = [m if m.ndim else m + out.square().mean(-1).sum() for m in more]
        return (out, *passed) if more else out


class Model(nn.Module):
    """Four layers, whose outputs go the ways that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        more = {"x0": [x], "aux": [x.new_zeros(())]}.get(self.kind, [])
        for layer in self.layers:
            x, *more = layer(x, *more) if more else (layer(x),)
        logits = self.head(x)
        return (logits, more[0]) if self.kind == "aux" else logits


class Opaque(nn.Module):
    """Returns what FSDP cannot look into; no block in it could call FSDP's attention to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embed(ids)))


class OwnPositions(fk.Transformer):
    """Counts the positions of what it is given, which is a slice under context parallelism."""

    def forward(self, input_ids: Tensor, **keywords: Any) -> Tensor:
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return super().forward(input_ids, position_ids=positions, **keywords)


def batches(mesh: Any) -> Any:
    """Random rows without end, others on each data-parallel rank."""
    rank, world = fk.data_ranks(mesh)
    for number in count(rank, world):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
        yield TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [ROWS])


def loss_fn(kind: str, model: Any, batch: Any) -> fk.Loss:
    """Cross-entropy, with the mistake that ``kind`` says."""
    if kind == "weight read before the call":
        weight = model.head.weight
        return fk.linear_cross_entropy(hidden(model, batch), weight, batch["labels"])
    output = model(batch["input_ids"])
    logits = output.logits if kind == "opaque" else output[0] if kind == "aux" else output
    loss = fk.cross_entropy(logits, batch["labels"])
    if kind == "a mean per micro-batch":
        return fk.Loss(loss.sum / loss.count, 1)
    if kind == "aux":
        return fk.Loss(loss.sum + output[1], loss.count)
    if kind == "a term over parameters":
        term = sum(p.square().sum() for p in model.parameters())
        return fk.Loss(loss.sum + 0.1 * term * loss.count, loss.count)
    return loss


def hidden(model: Any, batch: Any) -> Tensor:
    """What the head gets, read by a hook."""
    found: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(batch["input_ids"])
    hook.remove()
    return found[0]


def build(kind: str, off: Sequence[tuple[str, Any]], mesh: Any) -> Any:
    """A record for ``verify``, with some functions of the library switched off.

    Args:
        kind: Which mistake, or ``"right"``.
        off: Functions as ``module:name``, each with what it returns instead.
        mesh: The mesh.
    """
    for path, answer in off:
        switch_off(path, answer)
    torch.manual_seed(0)
    model = make_model(kind)
    if kind == "a forgotten mesh":
        state = alone(model, sgd)
    else:
        state = lay_out(model, mesh, sgd, plan=PLAN if isinstance(model, Model) else None)
    loss = partial(loss_fn, kind)
    return SimpleNamespace(state=state, loss_fn=loss, loader=batches(mesh), micro_batches=4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_model(kind: str) -> nn.Module:
    """The model that has the mistake, or is right."""
    if kind == "own positions":
        return OwnPositions(SPEC)
    if kind == "experts":
        return fk.Transformer(attrs.evolve(SPEC, moe=MOE))
    return Opaque() if kind == "opaque" else Model(kind)


def switch_off(path: str, answer: Any) -> None:
    """Let a function return ``answer`` and do nothing; a constant becomes it.

    An answer that is a function takes the original, and returns what stands in for it.
    """
    owner, name = re.fullmatch(r"(.*)[:.](\w+)", path).groups()
    original = pkgutil.resolve_name(path)
    if callable(answer):
        stand_in = answer(original)
    else:
        stand_in = (lambda *_, **__: answer) if callable(original) else answer
    setattr(pkgutil.resolve_name(owner), name, stand_in)


def first_alone(send: Any) -> Any:
    """Let only the first tensor that crosses between stages bring a gradient back."""

    def sent(stage: Any, run: Any) -> Any:
        out = send(stage, run)
        first, *others = out if isinstance(out, tuple) else (out,)
        rest = [t.detach() + 0 * t for t in others]
        return (first, *rest) if rest else first

    return sent


def raises(mesh: Any) -> Any:
    """An error on rank 1 alone."""
    if fk.process_rank() == 1:
        raise RuntimeError("the disk of rank 1 is full")
    return build("right", (), mesh)


def hangs(mesh: Any) -> Any:
    """Rank 1 never comes."""
    while fk.process_rank() == 1:
        time.sleep(0.1)
    return build("right", (), mesh)


def dies(mesh: Any) -> Any:
    """Rank 1 ends without a word."""
    if fk.process_rank() == 1:
        os._exit(7)
    return build("right", (), mesh)


def another_mesh(mesh: Any) -> Any:
    """A mesh of its own, not the one that was asked for."""
    return build("right", (), fk.build_mesh(fk.MeshSpec(dp_shard=2), device="cpu"))


def no_targets(mesh: Any) -> Any:
    """Batches in which nothing is to be learnt."""
    record = build("right", (), mesh)
    record.loader = (fk.data.mask_batch(batch) for batch in batches(mesh))
    return record


def in_16_bits(mesh: Any) -> Any:
    """A precision that is not taken from anywhere."""
    record = build("right", (), mesh)
    options = {"plan": PLAN, "blocks": "layers", "precision": "bf16"}
    record.state = lay_out(Model("right"), mesh, sgd, **options)
    return record


def with_adapters(mesh: Any) -> Any:
    """Adapters on a model in float32 that draws its own weights in each process; dropout in all."""
    model = fk.add_lora(nn.Module.float(Dropped()), rank=2, targets=("*.up",), dropout=0.5)
    state = lay_out(model, mesh, sgd, blocks="layers")
    loss = partial(loss_fn, "right")
    return SimpleNamespace(state=state, loss_fn=loss, loader=batches(mesh), micro_batches=2)


class Dropped(Model):
    """Dropout of both kinds, and initial weights that nobody has seeded."""

    def __init__(self) -> None:
        torch.seed()
        super().__init__("right")
        self.attention_dropout = 0.3
        for layer in self.layers:
            layer.act = nn.Sequential(nn.GELU(), nn.Dropout(0.5))

    def forward(self, ids: Tensor) -> Any:
        return nn.functional.dropout(super().forward(ids), self.attention_dropout)
