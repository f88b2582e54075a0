"""Evaluate on several other sets; the mean is over targets, not over batches.

How a set is divided into batches does not matter, and nothing of the state changes.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def counting(seed, rows, by):
    start = torch.randint(32, (rows, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + by * torch.arange(17)) % 32
    labels = ids[:, 1:].clone()
    labels[0, 5:] = -100  # a short row
    return TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [rows])


model = fk.Transformer(spec, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-2))
while state.step < 40:
    state, _ = step(state, [counting(state.step, 8, by=1)])

sets = {"forward": counting(1000, 12, by=1), "by_three": counting(1001, 12, by=3)}
whole = fk.evaluate(state, {name: [rows] for name, rows in sets.items()}, loss_fn)
parts = fk.evaluate(state, {name: rows.split([1, 4, 7]) for name, rows in sets.items()}, loss_fn)
for name in sets:
    key = f"eval/{name}/loss"
    print(f"{key} {whole[key]:.4f}, in three parts {parts[key]:.4f}")
