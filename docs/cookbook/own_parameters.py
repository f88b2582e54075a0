"""Parameters of your own under tensor parallelism: each is a module that the plan can name.

    python own_parameters.py    # two ranks against one process, in float64

A block that held ``nn.Parameter`` itself would leave the plan without a name for it.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import forgekit as fk

VOCAB, DIM, HEAD, FFN, LAYERS, SEQ_LEN = 32, 16, 4, 32, 2, 8
PLAN = {
    "tokens": "embedding",
    **dict.fromkeys(["h.*.query", "h.*.key", "h.*.value", "h.*.up", "head"], "colwise"),
    **dict.fromkeys(["h.*.project", "h.*.down"], "rowwise"),
    "h.*.temperature": "channels",  # one value per sharded head: each rank holds its part
    "h.*.scale": "channels",  # the same, per sharded channel
    "h.*.slope": "heads",  # one value for all sharded channels: gradients are summed
    "h.*.gain": "replicate",  # outside of the sharded channels: all ranks compute the same
}
WITH_POSITIONS = PLAN | {"*norm": "sequence", "h.*.gain": "heads"}  # each rank has some positions


class Factor(nn.Module):
    """One value per channel, or per head."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self):  # fills it in every layout, from the seed and its name
        nn.init.uniform_(self.weight, 0.5, 1.5)

    def forward(self, x):  # under `channels`, `self.weight` is this rank's part
        return x * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.project = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.temperature, self.scale = Factor(DIM // HEAD), Factor(FFN)
        self.slope, self.gain = nn.PReLU(), Factor(DIM)

    def forward(self, x):
        y = self.attention_norm(x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, HEAD)) for linear in (self.query, self.key, self.value)
        )  # [b s heads/tp channels]
        q = self.temperature(q.transpose(2, 3)).permute(0, 3, 1, 2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.gain(self.down(self.scale(self.slope(self.up(self.mlp_norm(x))))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(SEQ_LEN + 1) * (index + 3) + index) % VOCAB
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def build(plan, mesh):
    with torch.device("meta"):
        model = Model()
    model = fk.parallelize(model, mesh, plan=plan, blocks="h", seed=0)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    rank, world = fk.data_ranks(mesh)
    loader = fk.make_loader(Rows(), batch_size=2, rank=rank, world=world)
    return SimpleNamespace(state=state, loss_fn=loss_fn, loader=loader, micro_batches=1)


if __name__ == "__main__":
    for plan in (PLAN, WITH_POSITIONS):
        report = fk.verify(partial(build, plan), fk.MeshSpec(tp=2), split=False)
        assert report.equal, report
        print(f"tp=2 against one process: worst error {report.error:.1e}")
