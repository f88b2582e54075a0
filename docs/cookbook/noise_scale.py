"""Estimate the gradient noise scale, in a case where it is known.

The model is one number w, the loss of a sample x is (w - x)^2 / 2. Its gradient, w - x, has the
mean w - 2 and the variance 9. At w = 0 the scale is 9 / 2^2 = 2.25 samples. Single estimates are
noisy: average both parts over time, then divide.
"""

import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.run import gradient_noise


def loss_fn(model, batch):
    error = model(torch.ones_like(batch["x"])) - batch["x"]
    return fk.Loss(error.square().sum() / 2, len(error))


model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))

generator = torch.Generator().manual_seed(0)
trace, gradient_sq = 0.0, 0.0
for _ in range(100):
    x = 2 + 3 * torch.randn(64, 1, generator=generator)
    noise = gradient_noise(state, TensorDict({"x": x}, [64]).split(4), loss_fn)
    trace += noise["noise/trace"].item() / 100
    gradient_sq += noise["noise/gradient_sq"].item() / 100
print(f"variance {trace:.2f} of 9, squared gradient {gradient_sq:.2f} of 4")
print(f"noise scale {trace / gradient_sq:.2f} of 2.25")
