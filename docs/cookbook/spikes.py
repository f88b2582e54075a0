"""Leave out steps whose loss stands out from those before: the weights stay as they were.

The decision is made on the device, the same on every rank; the host does not wait for it.
"""

import torch
from tensordict import TensorDict

import forgekit as fk


def loss_fn(model, batch):
    error = (model(batch["x"]) - batch["y"]).square()
    return fk.Loss(error.sum(), len(error))


def rows(seed):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    y = x.sum(1, keepdim=True)
    return TensorDict({"x": x, "y": -100 * y if seed == 30 else y}, [16])  # one is poisoned


def train(spikes):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    state = fk.TrainState.create(model, fk.adamw(model, weight_decay=0.0))
    step = fk.make_step(
        loss_fn, schedule=fk.optim.constant(0.05), max_norm=float("inf"), spikes=spikes
    )
    left_out = 0
    for number in range(40):
        state, metrics = step(state, [rows(number)])
        left_out += int(metrics["skipped"])
    return left_out, fk.evaluate(state, [rows(1000)], loss_fn)["loss"]


for name, spikes in (
    ("without", None),
    ("with", fk.steps.SpikeLimit(sigmas=6, window=20, least=10)),
):
    left_out, loss = train(spikes)
    print(f"{name} a limit: {left_out} left out, loss {loss:.4f}")
