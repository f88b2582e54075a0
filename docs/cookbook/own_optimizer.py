"""An optimizer of your own: a `torch.optim.Optimizer` whose `step()` needs no closure.

It gets gradients of the token mean, clipped already, and is not called where a step is bad: a
loss of NaN leaves weights and momentum as they are. State by parameter is saved and sharded.
"""

import torch
from tensordict import TensorDict

import forgekit as fk


class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params, momentum=0.9):
        super().__init__(params, {"lr": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(group["lr"] * state["momentum"].sign())


def loss_fn(model, batch):
    error = (model(batch["x"]) - batch["y"]).square()
    return fk.Loss(error.sum(), len(error))


def rows(step):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return TensorDict({"x": x, "y": x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])}, [16])


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
state = fk.TrainState.create(model, SignMomentum(model.parameters()))
step = fk.make_step(loss_fn, schedule=fk.warmup_cosine(peak=0.1, warmup=1, total=100))
losses = []
for number in range(100):
    state, metrics = step(state, [rows(number)])
    losses.append(metrics["loss"].item())
print(f"error {losses[0]:.2f}, then {losses[-1]:.5f}")

before = model.weight.clone()
broken = rows(100)
broken["y"][3] = float("nan")
state, metrics = step(state, [broken])
print(f"skipped {int(metrics['skipped'])}, weights moved {(model.weight - before).abs().max():.1f}")
