"""From what a step does to how long it takes: a roofline, with stated efficiencies.

Matrix products run at a share of the device's peak, other kernels at a share of its memory
bandwidth, collectives at a share of the slowest link between their ranks. Sharded data parallelism
and rings compute while they communicate, all else waits. No number here was measured on a device
by this project: the efficiencies are assumptions, see ``docs/plan.md``.
"""

from __future__ import annotations

import math
from collections import Counter
from types import MappingProxyType

import attrs
import torch

from forgekit.run.machines import Machine
from forgekit.run.plan.collectives import Call
from forgekit.run.plan.watch import Work

PRODUCTS = 0.7
"""Share of its peak that a device reaches in large matrix products and attention."""
TRAFFIC = 0.8
"""Share of the memory bandwidth that other kernels reach."""
LINKS = 0.75
"""Share of a link's bandwidth that a collective reaches."""
LATENCY_NODE_S, LATENCY_NETWORK_S = 10e-6, 20e-6
"""Of a collective inside a node and across nodes, for each doubling of its ranks."""
HOST_S = 5e-6
"""What the host needs to launch a kernel; it works ahead of the device."""
HIDDEN = 0.8
"""Share of the computation behind which sharded data parallelism and rings can communicate."""
USABLE = 0.92
"""Share of a device's memory that tensors can have: contexts, buffers of communication and gaps
between allocations take the rest."""

_PEAKS = MappingProxyType({torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32"})


@attrs.frozen(kw_only=True)
class Seconds:
    """Time of one rank's step.

    Attributes:
        compute: Of its kernels.
        waiting: Of communication that nothing hides.
    """

    compute: float
    waiting: float

    @property
    def busy(self) -> float:
        """All of it, but for the wait for other stages of a pipeline."""
        return self.compute + self.waiting


def peak_of(machine: Machine, dtype: torch.dtype) -> float:
    """Peak of dense products in a dtype, float32 as TF32, float64 as float32."""
    return machine.peaks[_PEAKS.get(dtype, "fp32")]


def estimate(
    machine: Machine, node_size: int, work: Work, calls: Counter[Call], hidden: frozenset[Call]
) -> Seconds:
    """Estimate a rank's step.

    Args:
        machine: What it runs on.
        node_size: Ranks of a node, neighbours by number.
        work: What it computes.
        calls: What it sends.
        hidden: Those of the calls that run while it computes.

    Returns:
        The time, pipeline bubbles apart.
    """
    products = work.flops + work.repeated
    device = sum(count / (PRODUCTS * peak_of(machine, d)) for d, count in products.items())
    device += work.moved / (TRAFFIC * machine.memory_bandwidth)
    compute = max(device, HOST_S * work.kernels)
    beside = ahead = 0.0
    for call, count in calls.items():
        spent = count * seconds_of(machine, node_size, call)
        if call in hidden:
            beside += spent
        else:
            ahead += spent
    return Seconds(compute=compute, waiting=ahead + max(0.0, beside - HIDDEN * compute))


def seconds_of(machine: Machine, node_size: int, call: Call) -> float:
    """Time of one collective, alone on its links."""
    ranks = len(call.ranks)
    if ranks < 2:
        return 0.0
    nodes = Counter(rank // node_size for rank in call.ranks)
    is_inside = len(nodes) == 1
    # Each device of a node has a network adapter, and a group uses those of all its members.
    network = machine.network_bandwidth * min(nodes.values())
    bandwidth = machine.link_bandwidth if is_inside else min(machine.link_bandwidth, network)
    latency = LATENCY_NODE_S if is_inside else LATENCY_NETWORK_S
    return latency * math.ceil(math.log2(ranks)) + _sent(call) / (LINKS * bandwidth)


def _sent(call: Call) -> float:
    """Bytes that a rank sends in a ring."""
    rounds = {"all_reduce": 2.0, "receive": 0.0}.get(call.op, 1.0)
    share = 1.0 if call.op in ("send", "broadcast") else (len(call.ranks) - 1) / len(call.ranks)
    return rounds * share * call.size
