"""Peak FLOP/s, bandwidths and latencies of A100 to B200, by their vendors.

Peaks are those of dense products: data sheets that quote sparse ones are halved. Nothing reaches
them; they are the denominator that makes utilisations comparable. Latencies are those with which
NCCL 2.28 itself chooses how to communicate: its ring with the protocol for medium sizes (LL128).

References:
    A100 https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    H100 https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    H200 https://www.nvidia.com/en-us/data-center/h200/
    B200 https://www.nvidia.com/en-us/data-center/hgx/
    latencies https://github.com/NVIDIA/nccl/blob/v2.28.3-1/src/graph/tuning.cc
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch


@attrs.frozen
class Machine:
    """A device type and its interconnect.

    Attributes:
        name: What the driver calls it, or a part of that.
        peaks: Floating-point operations per second of dense products, by dtype: ``"bf16"``,
            ``"fp16"``, ``"tf32"``, ``"fp32"``.
        memory_bytes: Of one device.
        memory_bandwidth: Bytes per second between the device and its memory.
        link_bandwidth: Bytes per second that a device sends to others of its node (NVLink; half of
            what data sheets quote for both directions).
        network_bandwidth: Bytes per second that a device sends to other nodes: one 400 Gb/s
            network adapter each, 200 Gb/s with an A100.
        launch_latency_s: Of any collective, however few ranks it has.
        link_latency_s: Of each of its steps to a neighbour in the node.
        network_latency_s: Of each of its steps to another node.
    """

    name: str
    peaks: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    launch_latency_s: float = 14e-6
    link_latency_s: float = 1.9e-6
    network_latency_s: float = 4e-6


def _peaks(bf16: float, tf32: float, fp32: float) -> dict[str, float]:
    """Convert from TFLOP/s."""
    tflops = {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32}
    return {dtype: peak * 1e12 for dtype, peak in tflops.items()}


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "a100": Machine("A100-SXM4-80GB", _peaks(312, 156, 19.5), 80e9, 2039e9, 300e9, 25e9),
        # The SXM form; PCIe and NVL have lower peaks.
        "h100": Machine("H100 80GB HBM3", _peaks(989.4, 494.7, 66.9), 80e9, 3350e9, 450e9, 50e9),
        "h200": Machine("H200", _peaks(989.4, 494.7, 66.9), 141e9, 4800e9, 450e9, 50e9),
        "b200": Machine("B200", _peaks(2250, 1100, 75), 180e9, 7700e9, 900e9, 50e9),
    }
)
"""Machines by their names in ``forgekit plan --device``."""


def machine_named(name: str) -> Machine | None:
    """Find a device by its driver's name; None if it is not in the table.

    Examples:
        >>> machine_named("NVIDIA H100 80GB HBM3").memory_bytes
        80000000000.0
        >>> machine_named("NVIDIA H100 PCIe") is machine_named("GB200") is None
        True
    """
    words = f" {name.removeprefix('NVIDIA').strip()} "
    return next((one for one in MACHINES.values() if f" {one.name} " in words), None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a device's peak FLOP/s for a dtype; None if unknown.

    float32 counts as TF32 where torch is allowed to use it
    (``torch.set_float32_matmul_precision``).
    """
    if device.type != "cuda":
        return None
    machine = machine_named(torch.cuda.get_device_name(device))
    key = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype)
    if key == "fp32" and torch.get_float32_matmul_precision() != "highest":
        key = "tf32"
    return None if machine is None or key is None else machine.peaks[key]
