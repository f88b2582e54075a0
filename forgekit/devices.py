"""Devices of this process: a missing one is refused before anything is built on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def devices_here(*, bindable: bool = False) -> list[str]:
    """Return the types of the devices that torch finds, the preferred one first.

    Args:
        bindable: Leave out an accelerator that ranks cannot be bound to.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    if bindable and not hasattr(torch.get_device_module(accelerator), "set_device"):
        return ["cpu"]
    return [accelerator.type, "cpu"]


def check_device(
    device: str | torch.device, available: Sequence[str] | None = None
) -> tuple[str, int | None]:
    """Raise unless a device exists.

    Args:
        device: As the user wrote it.
        available: The types of devices that will do; those of ``devices_here`` if not given.

    Returns:
        Its type and, of an accelerator, its index if one was given.

    Raises:
        ValueError: With the devices that are there.

    Examples:
        >>> check_device("cpu")
        ('cpu', None)
    """
    available = available or devices_here()
    kind, _, index = str(device).partition(":")
    if kind not in available:
        raise ValueError(
            f"device is {str(device)!r}, but torch finds no such device here; it finds "
            f"{' and '.join(available)}. Use one of them, or leave it out to get {available[0]}."
        )
    if kind == "cpu" or not index:
        return kind, None
    count = torch.get_device_module(kind).device_count()
    if index not in map(str, range(count)):
        shown = f"{kind}:0" if count == 1 else f"{kind}:0 to {kind}:{count - 1}"
        raise ValueError(
            f"device is {str(device)!r}, but this process sees only {shown}. Use {kind!r}, which "
            "chooses one that is there."
        )
    return kind, int(index)
