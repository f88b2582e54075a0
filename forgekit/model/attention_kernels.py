"""Choice of attention kernels by a table of requirements, at set-up and at each call.

A device is judged by its backend, not by its name: whether a kernel is registered for it,
or the compiler writes Triton for it. What a kernel does not take stands here too, since torch
refuses some of it late and some (float32 on a fake device) never.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import attrs
import torch

Kernel = Literal["flash", "varlen", "flex", "sdpa"]

AttentionChoice = Literal["auto", "flash", "varlen", "flex", "sdpa"]

AttentionUse = Literal["rows", "documents", "scattered", "ring"]
"""Whole rows, packed rows whose documents do not see each other, those whose documents do not lie
together, the blocks of a ring."""

FLASH = "aten::_flash_attention_forward"
TRITON = "Triton"
HALVES = (torch.float16, torch.bfloat16)


@attrs.frozen
class Requirements:
    """Requirements of a kernel on device and queries.

    Attributes:
        operator: What the device must have a kernel for, or ``TRITON``.
        dtypes: Of queries, keys and values.
        multiple: Divides the channels of a head.
        most: Channels of a head.
    """

    operator: str
    dtypes: tuple[torch.dtype, ...]
    multiple: int
    most: int


KERNELS: Mapping[str, Requirements] = MappingProxyType(
    {
        "flash": Requirements(FLASH, HALVES, 8, 256),
        "varlen": Requirements(FLASH, HALVES, 8, 256),
        "flex": Requirements(TRITON, (*HALVES, torch.float32), 16, 256),
    }
)
"""``"sdpa"`` supports everything: torch's choice, with a mask or one call per document."""

ORDER: Mapping[AttentionUse, tuple[Kernel, ...]] = MappingProxyType(
    {
        "rows": ("sdpa", "flash", "varlen", "flex"),
        "documents": ("varlen", "flex", "sdpa"),
        "scattered": ("flex", "sdpa"),
        "ring": ("flash", "sdpa"),
    }
)
"""Kernels for each use; the first whose requirements are met is chosen."""


def choose(
    use: AttentionUse,
    device: torch.device,
    dtype: torch.dtype,
    channels: int | None,
    attention: AttentionChoice = "auto",
) -> Kernel:
    """Choose the kernel, or check the requested one.

    Args:
        use: What it is to compute.
        device: Where.
        dtype: Of queries, keys and values.
        channels: Of a head, ``c``; None if they are not known yet.
        attention: ``"auto"``, or the only kernel that may be chosen.

    Returns:
        The kernel.

    Raises:
        ValueError: If the requested one cannot do it; names those that can.

    Examples:
        >>> choose("documents", torch.device("cpu"), torch.float32, 64)
        'sdpa'
    """
    here, able = (device, dtype, channels), ORDER[use]
    fitting: list[Kernel] = [kernel for kernel in able if why_not(kernel, *here) is None]
    for kernel in fitting:
        if attention in ("auto", kernel):
            return kernel
    why = f"it cannot compute {use}"
    if attention in able:
        why = why_not(attention, *here)
    raise ValueError(
        f"attention is {attention!r}, but {why}. For {use} in {dtype} on {device.type} pass "
        f"{', '.join(map(repr, fitting))} or 'auto'."
    )


def why_not(
    kernel: str, device: torch.device, dtype: torch.dtype, channels: int | None
) -> str | None:
    """Return why a kernel cannot run on a device, or with a dtype or head width; else None."""
    needs = KERNELS.get(kernel)
    if needs is None:
        return None
    if not _offers(device.type, needs.operator):
        return f"{device.type} has no {needs.operator} for it"
    if dtype not in needs.dtypes:
        return f"it takes {', '.join(map(str, needs.dtypes))}, not {dtype}"
    if channels is not None and (channels % needs.multiple or channels > needs.most):
        return (
            f"it takes heads of up to {needs.most} channels that {needs.multiple} divides, "
            f"not of {channels}"
        )
    return None


@torch.compiler.assume_constant_result
def _offers(device: str, operator: str) -> bool:
    """Whether a device type has an operator's kernel; constant for the compiler."""
    if operator == TRITON:
        return device != "cpu" and _writes_triton(device)  # flex has no backward on a CPU
    key = torch._C._dispatch_key_for_device(device)
    return (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
        and _compute_capability(device) >= 8
    )


def _compute_capability(device: str) -> float:
    """Return the major compute capability (CUDA's flash kernels need 8); inf elsewhere."""
    ask = getattr(getattr(torch, device, None), "get_device_capability", lambda: None)
    capability = ask()
    return capability[0] if isinstance(capability, tuple) else math.inf


def _writes_triton(device: str) -> bool:
    from torch._dynamo.device_interface import get_interface_for_device
    from torch.utils._triton import has_triton_package

    try:
        backend = get_interface_for_device(device)
    except NotImplementedError:  # a device unknown to the compiler
        return False
    return has_triton_package() and backend.is_available() and backend.is_triton_capable()
