"""Keep an exponential moving average of the weights, evaluate it, and go on training.

The average is part of the state: it is sharded as the weights are and is saved with them.
"""

import torch
from tensordict import TensorDict

import forgekit as fk


def loss_fn(model, batch):
    error = (model(batch["x"]) - batch["y"]).square()
    return fk.Loss(error.sum(), len(error))


def rows(seed, noise):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, generator=generator)
    y = x.sum(1, keepdim=True) + noise * torch.randn(8, 1, generator=generator)
    return TensorDict({"x": x, "y": y}, [8])


torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
state = fk.TrainState.create(model, fk.adamw(model), average=fk.optim.EMA(0.98))
step = fk.make_step(loss_fn, schedule=fk.optim.constant(0.05))
for number in range(300):
    state, _ = step(state, [rows(number, noise=2.0)])

held_out = [rows(seed, noise=0.0) for seed in range(1000, 1010)]
weights = model.weight.clone()
plain = fk.evaluate(state, held_out, loss_fn)["loss"]
with fk.evaluation.averaged(state):
    average = fk.evaluate(state, held_out, loss_fn)["loss"]
print(f"error of the weights {plain:.3f}, of their average {average:.3f}")
print(f"weights back {torch.equal(model.weight, weights)}")
