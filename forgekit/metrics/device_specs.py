"""What the devices that people train on can do at best, as their makers state it.

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


@attrs.frozen(kw_only=True)
class Machine:
    """A device, and how devices of its kind are connected.

    Attributes:
        names: What the driver calls it; a device is of this kind if its name contains one of them.
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

    names: tuple[str, ...]
    peaks: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    launch_latency_s: float = 14e-6
    link_latency_s: float = 1.9e-6
    network_latency_s: float = 4e-6


def _peaks(bf16: float, tf32: float, fp32: float) -> Mapping[str, float]:
    """Of TFLOP/s; tensor cores treat both 16-bit formats alike."""
    return MappingProxyType(
        {"bf16": bf16 * 1e12, "fp16": bf16 * 1e12, "tf32": tf32 * 1e12, "fp32": fp32 * 1e12}
    )


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "a100": Machine(
            names=("A100-SXM4-80GB",),
            peaks=_peaks(312, 156, 19.5),
            memory_bytes=80e9,
            memory_bandwidth=2.039e12,
            link_bandwidth=300e9,
            network_bandwidth=25e9,
        ),
        "h100": Machine(
            names=("H100 80GB HBM3",),  # the SXM form; PCIe and NVL have lower peaks
            peaks=_peaks(989.4, 494.7, 66.9),
            memory_bytes=80e9,
            memory_bandwidth=3.35e12,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        "h200": Machine(
            names=("H200",),
            peaks=_peaks(989.4, 494.7, 66.9),
            memory_bytes=141e9,
            memory_bandwidth=4.8e12,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        "b200": Machine(
            names=("B200",),
            peaks=_peaks(2250, 1100, 75),
            memory_bytes=180e9,
            memory_bandwidth=7.7e12,
            link_bandwidth=900e9,
            network_bandwidth=50e9,
        ),
    }
)
"""By the names that ``forgekit plan --device`` takes."""


def machine_named(name: str) -> Machine | None:
    """Find a device by the name that its driver gives it; None if it is not in the table.

    Examples:
        >>> machine_named("NVIDIA H100 80GB HBM3").memory_bytes
        80000000000.0
        >>> machine_named("NVIDIA H100 PCIe") is machine_named("GB200") is None
        True
    """
    words = f" {name.removeprefix('NVIDIA').strip()} "
    found = (one for one in MACHINES.values() if any(f" {own} " in words for own in one.names))
    return next(found, None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of a device in a dtype, in floating-point operations per second; None if unknown.

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
