"""Freeze a part of a model, and train the rest at two rates.

`update` sets the rate of each parameter group to the schedule's times the group's `lr_scale`.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)
model = fk.Transformer(spec, seed=0)
model.embedding.requires_grad_(False)
optimizer = torch.optim.AdamW(
    [
        {"params": model.layers.parameters(), "lr_scale": 0.1},
        {"params": [*model.norm.parameters(), *model.output.parameters()]},
    ],
    weight_decay=0.0,
    fused=True,
)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(0))
batch = TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [8])
before = {name: parameter.clone() for name, parameter in model.named_parameters()}
state = fk.TrainState.create(model, optimizer)
step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-3))
state, metrics = step(state, [batch])

for name in ("embedding.weight", "layers.0.attention.query.weight", "output.weight"):
    moved = (state.model.get_parameter(name) - before[name]).abs().max()
    print(f"{name} moved {moved:.6f}")  # Adam's first step is the rate
