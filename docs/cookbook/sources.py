"""Mix two sources in given shares, and log the loss of each beside the loss of all.

The order is a pure function of the sample's number: any layout sees the same samples.
"""

from itertools import islice

import torch
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)


def source(rows, by, seed):
    start = torch.randint(32, (rows, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + by * torch.arange(17)) % 32
    return [TensorDict({"input_ids": row[:-1], "labels": row[1:]}) for row in ids]


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


sets = {"by_one": source(200, 1, seed=0), "by_three": source(100, 3, seed=1)}
order = fk.data.make_order(
    {name: len(rows) for name, rows in sets.items()}, weights={"by_one": 3, "by_three": 1}, seed=0
)
dataset = fk.data.mixture_dataset(sets, order)

model = fk.Transformer(spec, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
step = fk.make_step(
    fk.steps.losses_by_source(loss_fn, order.sources), schedule=fk.optim.constant(1e-2)
)
seen = dict.fromkeys(order.sources, 0.0)
with fk.make_loader(dataset, 8) as loader:
    for batches in islice(fk.groups(loader, 2), 25):
        state, metrics = step(state, batches)
        for name in seen:
            seen[name] += metrics[f"source/{name}/targets"].item()

print(f"share of by_one {seen['by_one'] / sum(seen.values()):.2f}")
parts = [metrics[f"source/{n}/loss"] * metrics[f"source/{n}/targets"] for n in order.sources]
print(f"loss {metrics['loss']:.6f}, of the parts {sum(parts) / metrics['targets']:.6f}")
