"""An optimizer as a user adds one: root mean squares, with decay. This file, and one in a table."""

from __future__ import annotations

import torch

from forgekit.optim.groups import decay_groups
from forgekit.optim.step_each import step_each, zeros


def rms(model, *, lr=1e-2, weight_decay=0.1):
    return RMS(decay_groups(model, weight_decay), {"lr": lr, "eps": 1e-3})


class RMS(torch.optim.Optimizer):
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        return step_each(self, rule, zeros("squares"), closure)


def rule(values, gradient, state, group):
    squares = 0.9 * state["squares"] + 0.1 * gradient.square()
    decayed = values * (1 - group["lr"] * group["weight_decay"])
    return decayed - group["lr"] * gradient / (squares.sqrt() + group["eps"]), {"squares": squares}
