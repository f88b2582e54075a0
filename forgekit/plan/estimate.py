"""Time of a step: a roofline model with stated efficiencies.

Matrix products run at a share of the device's peak, other kernels at a share of its memory
bandwidth, collectives at a share of the slowest link between their ranks. Sharded data parallelism
and rings compute while they communicate, all else waits. No number here was measured on a device
by this project: the efficiencies are held against published runs, see ``docs/plan.md``.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import attrs
import numpy as np
import torch

from forgekit.metrics.device_specs import Machine
from forgekit.plan.watch import Call, Work

PRODUCTS = 0.7
"""Fraction of peak FLOP/s in large matmuls and attention."""
TRAFFIC = 0.8
"""Fraction of memory bandwidth in other kernels."""
LINKS = 0.75
"""Fraction of link bandwidth in collectives."""
HOST_S = 5e-6
"""Host time to launch a kernel; the host runs ahead of the device."""
HIDDEN = 0.8
"""Fraction of computation that overlaps communication of sharded data parallelism and rings."""
USABLE = 0.92
"""Share of a device's memory that tensors can have: contexts, buffers of communication and gaps
between allocations take the rest."""

_PEAKS = MappingProxyType({torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32"})


@attrs.frozen(kw_only=True)
class Seconds:
    """Time of one rank's step.

    Attributes:
        compute: Of its kernels.
        waiting: Of communication that nothing can hide.
        exposed: Of communication that computation could hide and is too short for.
    """

    compute: float
    waiting: float
    exposed: float

    @property
    def busy(self) -> float:
        """The time without waiting for other pipeline stages."""
        return self.compute + self.waiting + self.exposed


def peak_of(machine: Machine, dtype: torch.dtype) -> float:
    """Return the peak of dense matmuls in a dtype, float32 as TF32, float64 as float32."""
    return machine.peaks[_PEAKS.get(dtype, "fp32")]


def estimate(machine: Machine, node_size: int, work: Work, hidden: frozenset[Call]) -> Seconds:
    """Estimate a rank's step.

    Args:
        machine: What it runs on.
        node_size: Ranks of a node, neighbours by number.
        work: What it computes and sends.
        hidden: Those of its calls that run while it computes.

    Returns:
        The time, without pipeline bubbles.
    """
    products = work.flops + work.repeated
    device = sum(count / (PRODUCTS * peak_of(machine, d)) for d, count in products.items())
    device += work.kernels["bytes"] / (TRAFFIC * machine.memory_bandwidth)
    compute = max(device, HOST_S * work.kernels["count"])
    sent = {call: n * seconds_of(machine, node_size, call) for call, n in work.calls.items()}
    beside = sum(seconds for call, seconds in sent.items() if call in hidden)
    waiting = sum(seconds for call, seconds in sent.items() if call not in hidden)
    return Seconds(compute=compute, waiting=waiting, exposed=max(0.0, beside - HIDDEN * compute))


def seconds_of(machine: Machine, node_size: int, call: Call) -> float:
    """Estimate one collective, alone on its links."""
    if len(call.ranks) < 2:
        return 0.0
    _, nodes = np.unique(np.array(call.ranks) // node_size, return_counts=True)
    # Each device has a network adapter, and a group uses those of all members.
    network = machine.network_bandwidth * int(nodes.min())
    bandwidth = machine.link_bandwidth
    bandwidth = bandwidth if len(nodes) == 1 else min(bandwidth, network)
    return _latency(machine, call, len(nodes)) + _sent(call) / (LINKS * bandwidth)


def _latency(machine: Machine, call: Call, nodes: int) -> float:
    """Sum the latency of a ring's steps; all-reduces over nodes go up and down a tree."""
    inside, between = len(call.ranks) - nodes, nodes - 1
    if call.op in ("send", "recv", "all_to_all"):  # all pairs concurrently
        inside, between = int(nodes == 1), int(nodes > 1)
    elif call.op == "all_reduce":
        inside, between = 2 * inside / nodes, 2 * math.log2(nodes)
    steps = inside * machine.link_latency_s + between * machine.network_latency_s
    return machine.launch_latency_s + steps


def _sent(call: Call) -> float:
    """Return the bytes that a rank sends in a ring."""
    rounds = {"all_reduce": 2.0, "recv": 0.0}.get(call.op, 1.0)
    share = 1.0 if call.op in ("send", "broadcast") else (len(call.ranks) - 1) / len(call.ranks)
    return rounds * share * call.size
