"""Count the magnitudes of weights and gradients by powers of two: what would a narrow dtype lose?

float16 has subnormal numbers below 2**-14 and nothing below 2**-24; bfloat16 and float32 end near
2**-126. On several ranks values are DTensors: `value.full_tensor()` has all of them.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)
SMALLEST, LARGEST = -40, 20


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def magnitudes(values):
    """By exponent e how many have 2**(e-1) <= |value| < 2**e; zeros are counted under None."""
    values = torch.cat([value.detach().float().flatten() for value in values])
    exponents = torch.frexp(values[values != 0]).exponent.clamp(SMALLEST, LARGEST)
    counts = dict(zip(*(x.tolist() for x in exponents.unique(return_counts=True)), strict=True))
    return counts | {None: int((values == 0).sum())}


ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(0))
batch = TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [8])
model = fk.Transformer(spec, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
totals = fk.reduce_totals(fk.accumulate(state, batch.split(4), loss_fn), state)
gradients = fk.gradients(state, totals)  # of the mean loss; .grad holds a scaled sum
for kind, values in (("weights", model.parameters()), ("gradients", gradients.values())):
    counts = magnitudes(values)
    subnormal = sum(count for e, count in counts.items() if e is not None and e <= -14)
    print(f"{kind}: {sum(counts.values())} values, {counts[None]} zeros, {subnormal} subnormal")
