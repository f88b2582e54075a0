"""Models as researchers write them: forms in which more than one tensor reaches a later block."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

import forgekit as fk

WIDTH, WORDS = 6, 11


class Mix(nn.Module):
    """A block of the stream and whatever else it takes, no two arguments alike."""

    def __init__(self, takes=1):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(takes))

    def forward(self, *given):
        parts = zip(self.inner, given, strict=True)
        return given[0] + sum(
            linear(x.cumsum(1)).tanh() / (1 + n) for n, (linear, x) in enumerate(parts)
        )


class Form(nn.Module):
    """Embedding, blocks, output; what lies between is each form's own."""

    takes = 1
    block = Mix

    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.before()
        self.layers = nn.ModuleList(self.block(self.takes) for _ in range(layers))
        self.after()
        self.top = nn.Linear(WIDTH, WORDS)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def before(self):
        pass

    def after(self):
        pass

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.top(x)


class EmbeddingToAll(Form):
    takes = 2

    def forward(self, ids):
        x = x0 = self.embed(ids)
        for layer in self.layers:
            x = layer(x, x0)
        return self.top(x)


class NormedEmbeddingToAll(Form):
    """With code between the parts, which each stage repeats for itself."""

    takes = 2

    def before(self):
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = x0 = F.rms_norm(self.norm(self.embed(ids)), (WIDTH,)) * 1.5
        for n, layer in enumerate(self.layers):
            x = layer(0.9**n * x + 0.1 * x0, x0.detach() if n % 2 else x0)
        return self.top(F.rms_norm(x, (WIDTH,)) + x0)


class UNet(Form):
    takes = 2

    def forward(self, ids):
        x = self.embed(ids)
        skips = []
        half = len(self.layers) // 2
        for n, layer in enumerate(self.layers):
            if n < half:
                skips.append(x)
                x = layer(x, x * 0.5)
            else:
                x = layer(x, skips.pop())
        return self.top(x)


class AuxBlock(Mix):
    def forward(self, x):
        out = super().forward(x)
        return out, (out.square().mean(), None)


class Aux(Form):
    block = AuxBlock

    def forward(self, ids):
        x, aux = self.embed(ids), 0.0
        for layer in self.layers:
            x, (mine, _) = layer(x)
            aux = aux + mine
        return self.top(x), aux


class ValueBlock(nn.Module):
    def __init__(self, takes):
        super().__init__()
        self.value, self.inner = nn.Linear(WIDTH, WIDTH), Mix()

    def forward(self, x, first):
        b, s, d = x.shape
        value = self.value(x).view(b, s, 2, d // 2).transpose(1, 2)
        if first is not None:
            value = 0.3 * value + 0.7 * first
        return self.inner(x + value.transpose(1, 2).reshape(b, s, d)), value


class ValueResidual(Form):
    block = ValueBlock

    def forward(self, ids):
        x, first = self.embed(ids), None
        for layer in self.layers:
            x, value = layer(x, first)
            first = value if first is None else first
        return self.top(x)


class Mixture(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(count))

    def forward(self, states):
        return torch.einsum("n...,n->...", torch.stack(states), self.weights)


class Collected(Form):
    """All hidden states, mixed at the end."""

    def after(self):
        self.mixture = Mixture(len(self.layers) + 1)

    def forward(self, ids):
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.top(self.mixture(states))


class Positions(Form):
    """Changed in place after it was embedded, with the embedding used again."""

    takes = 2

    def before(self):
        self.positions = nn.Embedding(16, WIDTH)
        self.act = nn.Tanh()

    def forward(self, ids):
        x = x0 = self.embed(ids)
        x += self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = self.act(layer(x, x0))
        return self.top(x)


class Copies(Form):
    """The ids once more near the end, and a part that is registered as one of a list."""

    def before(self):
        self.stems = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def after(self):
        self.tops = nn.ModuleDict({"gate": nn.Linear(WIDTH, 1)})

    def forward(self, ids):
        x = self.embed(ids)
        for stem in self.stems:
            x = stem(x).relu()
        for layer in self.layers:
            x = layer(x)
        return self.top(x) + self.tops["gate"](x) * F.one_hot(ids, WORDS)


@dataclasses.dataclass
class Out:
    x: torch.Tensor
    memory: dict
    is_first: bool


class DataBlock(Mix):
    def forward(self, given):
        memory = given.memory["last"] if given.memory else given.x
        out = super().forward(given.x, memory)
        return Out(out, {"last": given.x, "mask": given.x > 0}, is_first=False)


class Data(Form):
    """Blocks that take and return a dataclass with a dictionary in it."""

    takes = 2
    block = DataBlock

    def forward(self, ids):
        out = Out(self.embed(ids), {}, is_first=True)
        for layer in self.layers:
            out = layer(out)
        return self.top(out.x * out.memory["mask"])


class NormBlock(Mix):
    def __init__(self, takes):
        super().__init__(takes)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        return super().forward(self.norm(x.mT).mT)


class Statistics(Form):
    block = NormBlock


class Twins(Form):
    """Two streams side by side, and one of them frozen."""

    takes = 2

    def before(self):
        self.other = nn.Embedding(WORDS, WIDTH).requires_grad_(False)

    def forward(self, ids):
        a, b = self.embed(ids), self.other(ids)
        for n, layer in enumerate(self.layers):
            a, b = (layer(a, b), a) if n % 2 else (layer(a, b), b)
        return self.top(a * b)


FORMS = {
    kind.__name__: kind
    for kind in (
        EmbeddingToAll,
        NormedEmbeddingToAll,
        UNet,
        Aux,
        ValueResidual,
        Collected,
        Positions,
        Copies,
        Data,
        Statistics,
        Twins,
    )
}


def loss_fn(model, batch):
    """Cross-entropy, and a term for each auxiliary output."""
    out = model(batch["input_ids"])
    logits, aux = out if isinstance(out, tuple) else (out, 0.0)
    loss = fk.cross_entropy(logits, batch["labels"])
    return fk.Loss(loss.sum + 3.0 * aux, loss.count)
