"""What is installed: Python, the packages that forgekit needs, its extras, devices and backends."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from forgekit.devices import devices_here
from forgekit.run.doctor.check import Check, tried

GIB = 2**30


def check_installed() -> Iterator[Check]:
    """Look at versions, extras, devices and backends of this process."""
    yield Check("python", "good", f"{platform.python_version()}, {platform.platform()}")
    needed, extras = _requirements()
    remedy = "Install forgekit again: pip install forgekit"
    for name in needed:
        yield tried(name, lambda name=name: importlib.metadata.version(name), remedy)
    for extra, names in extras.items():
        missing = [name for name in names if _version(name) is None]
        said = ", ".join(f"{name} {_version(name)}" for name in names if name not in missing)
        yield (
            Check(f"extra {extra}", "note", _install(extra, missing))
            if missing
            else Check(f"extra {extra}", "good", said)
        )
    yield Check("processor", "good", f"{len(os.sched_getaffinity(0))} cores, {_memory()}")
    yield from _devices()
    yield _backends()


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Distributions that forgekit always needs, and those of each extra for its users."""
    needed, extras = [], {}
    for line in importlib.metadata.requires("forgekit") or ():
        name = re.match(r"[\w.\-]+", line)
        extra = re.search(r"extra == ['\"]([\w\-]+)['\"]", line)
        if name is None or (extra is not None and extra[1] in ("dev", "docs")):
            continue
        (needed if extra is None else extras.setdefault(extra[1], [])).append(name[0])
    return needed, extras


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(extra: str, missing: list[str]) -> str:
    return (
        f'no {", ".join(missing)}; features that need it are off. pip install "forgekit[{extra}]"'
    )


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / GIB:.1f} GiB"


def _devices() -> Iterator[Check]:
    kind = devices_here(bindable=True)[0]
    if kind == "cpu":
        found = f"torch {torch.__version__} finds none; runs use the CPU"
        yield Check("accelerator", "note", found)
        return
    module = torch.get_device_module(kind)
    remedy = "Look at its driver (nvidia-smi); a process that hangs on it may have to be ended."
    for index in range(module.device_count()):
        yield tried(f"{kind}:{index}", lambda i=index: _device(kind, i), remedy)


def _device(kind: str, index: int) -> str:
    """Name and memory of a device, after it has multiplied two matrices."""
    device = torch.device(kind, index)
    square = torch.full((64, 64), 2.0, device=device)
    if (square @ square).sum().item() != 4.0 * 64**3:
        raise RuntimeError("a product of matrices is wrong")
    module = torch.get_device_module(kind)
    free, total = (number / GIB for number in module.mem_get_info(index))
    return f"{module.get_device_name(index)}, {free:.1f} of {total:.1f} GiB free"


def _backends() -> Check:
    asked = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    found = [name for name, is_here in asked.items() if is_here()]
    text = f"{' and '.join(found) or 'none'} in torch {torch.__version__}"
    return Check("backends", "good" if "gloo" in found else "bad", text)
