"""Log the gradient norm of each layer, with the step written out.

Do not log norms of `.grad`: it holds a scaled sum, and of that one shard. `fk.metrics.layer_norms`
gives those of the mean loss's gradient, the same in every layout.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=3, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def rows(step):
    ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(step))
    return TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [8])


model = fk.Transformer(spec, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
schedule = fk.optim.constant(1e-3)
while state.step < 3:
    totals = fk.accumulate(state, rows(state.step).split(4), loss_fn)
    totals = fk.reduce_totals(totals, state)
    norms = fk.metrics.layer_norms(state, totals)  # between reduce_totals and update
    correction = fk.clip(totals, max_norm=1.0)
    state = fk.update(state, correction, lr=schedule(state.step), totals=totals)

for layer, norm in norms.items():
    print(f"{layer:21} {norm:.4f}")
together = torch.stack(list(norms.values())).square().sum().sqrt()
print(f"together {together:.6f}, of the step {correction.grad_norm:.6f}")
