"""Estimate the gradient noise scale, in a case where it is known.

The model is one number w, the loss of a sample x is (w - x)^2 / 2. Its gradient, w - x, has the
mean w - 2 and the variance 9. At w = 0 the scale is 9 / 2^2 = 2.25 samples. Single estimates are
noisy: average both parts over time, then divide. Every micro-batch needs a target.
"""

import math

import torch
from tensordict import TensorDict

import forgekit as fk


def loss_fn(model, batch):
    error = model(torch.ones_like(batch["x"])) - batch["x"]
    return fk.Loss(error.square().sum() / 2, len(error))


def gradient_noise(state, batches, loss_fn):
    """The variance of one target's gradient, and the squared norm of the mean one's."""

    def square(batches):
        totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
        return fk.clip(totals, max_norm=math.inf).grad_norm.square(), totals["targets"]

    parts, counts = map(torch.stack, zip(*(square([batch]) for batch in batches), strict=True))
    whole, count = square(batches)
    trace = (parts.mean() - whole) / (counts.double().reciprocal().mean() - 1 / count)
    return trace, whole - trace / count


model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))

generator = torch.Generator().manual_seed(0)
trace, gradient_sq = 0.0, 0.0
for _ in range(50):
    x = 2 + 3 * torch.randn(64, 1, generator=generator)
    batches = TensorDict({"x": x}, [64]).split(4)
    variance, square = gradient_noise(state, batches, loss_fn)
    trace += variance.item() / 50
    gradient_sq += square.item() / 50
print(f"variance {trace:.2f} of 9, squared gradient {gradient_sq:.2f} of 4")
print(f"noise scale {trace / gradient_sq:.2f} of 2.25")
