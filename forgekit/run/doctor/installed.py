"""What is installed: Python, the packages that forgekit needs, its extras, devices and backends."""

from __future__ import annotations

import importlib.metadata
import operator
import os
import platform
import re
from collections.abc import Iterator
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from forgekit.devices import devices_here
from forgekit.run.doctor.check import Check, tried

GIB = 2**30
BOUNDS = MappingProxyType({">=": operator.ge, "<": operator.lt})


def check_installed() -> Iterator[Check]:
    """Look at versions, extras, devices and backends of this process."""
    yield Check("python", "good", f"{platform.python_version()}, {platform.platform()}")
    needed, extras = _requirements()
    for name, range_ in needed.items():
        remedy = f'pip install "{name}{range_}"'
        yield tried(name, lambda name=name, range_=range_: _version(name, range_), remedy)
    for extra, packages in extras.items():
        install = f'Features that need it are off; for them: pip install "forgekit[{extra}]"'
        yield tried(
            f"extra {extra}",
            lambda packages=packages: ", ".join(
                f"{n} {_version(n, r)}" for n, r in packages.items()
            ),
            install,
            otherwise="note",
        )
    yield Check("processor", "good", f"{len(os.sched_getaffinity(0))} cores, {_memory()}")
    yield from _devices()
    yield _backends()


def _requirements() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Packages that forgekit always needs with their ranges, and those of each extra for users."""
    needed, extras = {}, {}
    for line in importlib.metadata.requires("forgekit") or ():
        package = re.match(r"([\w.\-]+)([^;\s]*)", line)
        extra = re.search(r"extra == ['\"]([\w\-]+)['\"]", line)
        if package is None or (extra is not None and extra[1] in ("dev", "docs")):
            continue
        (needed if extra is None else extras.setdefault(extra[1], {}))[package[1]] = package[2]
    return needed, extras


def _version(name: str, range_: str) -> str:
    """The installed version of a package, which has to be in a range such as ``>=2.11,<3``."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{name} is not installed") from None
    bounds = re.findall(r"(>=|<)([\d.]+)", range_)
    if not all(BOUNDS[sign](TorchVersion(version), bound) for sign, bound in bounds):
        raise ValueError(f"{name} {version} is installed and {range_} is needed")
    return version


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / GIB:.1f} GiB"


def _devices() -> Iterator[Check]:
    kind = devices_here(bindable=True)[0]
    if kind == "cpu":
        found = (
            f"torch {torch.__version__} finds none; runs use the CPU. On a machine that has one: "
            "install the build of torch for it (pytorch.org), and its driver."
        )
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
    asked = {"gloo (CPUs)": dist.is_gloo_available, "nccl (NVIDIA GPUs)": dist.is_nccl_available}
    found = [name for name, is_here in asked.items() if is_here()]
    text = f"{' and '.join(found) or 'none'}: what ranks talk to each other through"
    if dist.is_gloo_available():
        return Check("backends", "good", text)
    remedy = "Runs need gloo, on GPUs too: install the build of torch that pip finds."
    return Check("backends", "bad", f"{text}. {remedy}")
