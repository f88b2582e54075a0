"""Save, and resume by hand: what goes on is the same, bit for bit.

`state.samples` is all that the data need, so there is no sampler or generator to save; the rate
is a function of the step.
"""

from itertools import islice

import torch
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16, dropout=0.1
)
ids = torch.randint(32, (50, 17), generator=torch.Generator().manual_seed(0))
dataset = [TensorDict({"input_ids": row[:-1], "labels": row[1:]}) for row in ids]


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def train(steps, directory):
    model = fk.Transformer(spec, seed=0)
    state = fk.TrainState.create(model, fk.adamw(model), seed=0)
    state = fk.checkpoint_load(state, directory)  # none there: the state as it is
    step = fk.make_step(loss_fn, schedule=fk.warmup_cosine(peak=1e-2, warmup=2, total=20))
    with fk.make_loader(dataset, 4, seed=state.seed, start=state.samples) as loader:
        for batches in islice(fk.groups(loader, 2), steps - state.step):
            state, metrics = step(state, batches)
    fk.checkpoint_save(state, directory, keep=2).wait()
    return state, metrics


straight, expected = train(8, "straight")
train(3, "resumed")
resumed, found = train(8, "resumed")
print(f"step {resumed.step}, sample {resumed.samples}, loss {found['loss']:.6f}")
same = all(map(torch.equal, straight.model.parameters(), resumed.model.parameters()))
print(f"all weights equal {same and torch.equal(found['loss'], expected['loss'])}")
