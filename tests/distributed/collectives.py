"""Which collectives run, counted where torch dispatches them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives"]

KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd"}


class Collectives(TorchDispatchMode):
    """Counts collectives by kind; those of a group of one rank move nothing and do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "forgekit":  # our own operators communicate inside
            with self:
                return OPDEFS[f"forgekit::{name}"]._init_fn(*args, **(kwargs or {}))
        if "c10d" in func.namespace and name not in SILENT and _ranks(func, args) > 1:
            self.found[KINDS[name]] += 1
        return func(*args, **(kwargs or {}))


def _ranks(func: Any, args: tuple[Any, ...]) -> int:
    """Size of the group among a collective's arguments."""
    for value in args:
        if isinstance(value, str):
            try:
                return _resolve_process_group(value).size()
            except (RuntimeError, ValueError):
                continue
        if "ProcessGroup" in str(getattr(value, "_type", lambda: "")()):
            return dist.ProcessGroup.unbox(value).size()
    raise AssertionError(f"{func} has no process group among its arguments")
