"""What a rank's memory is used for, in GiB, as a row of metrics has it."""

from __future__ import annotations

import resource

import torch
from torch import Tensor

from forgekit.state import TrainState
from forgekit.tensors import local

GIB = 2.0**30


def memory_of(state: TrainState, device: torch.device) -> dict[str, float]:
    """What this rank's parameters, gradients and the optimizer's state take, and the peak.

    Args:
        state: The state; its gradients are those that are in ``.grad`` now.
        device: What the steps ran on.

    Returns:
        ``memory/parameters_gib``, ``memory/gradients_gib``, ``memory/optimizer_gib`` and
        ``memory/peak_gib``; on an accelerator ``memory/activations_gib``, the rest of the peak.
    """
    parameters = list(state.model.parameters())
    moments = [value for values in state.optimizer.state.values() for value in values.values()]
    kinds = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer": moments,
    }
    held = {name: [local(x) for x in some if isinstance(x, Tensor)] for name, some in kinds.items()}
    sizes = {name: sum(tensor.nbytes for tensor in some) for name, some in held.items()}
    sizes["peak"] = _peak(device)
    if device.type != "cpu":  # what lies on the host is no part of the peak
        there = [x.nbytes for some in held.values() for x in some if x.device.type == device.type]
        sizes["activations"] = sizes["peak"] - sum(there)
    return {f"memory/{name}_gib": size / GIB for name, size in sizes.items()}


def _peak(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
