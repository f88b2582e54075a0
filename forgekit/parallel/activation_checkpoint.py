"""Activation checkpointing, and compilation of blocks.

Both work on one block at a time and keep its parameters' names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forgekit.model.layers import Block, FeedForward
from forgekit.parallel.module_forward import wrap_forward

ActivationCheckpoint = Literal["none", "full", "selective", "budget"]


def recompute(block: nn.Module, mode: ActivationCheckpoint) -> None:
    """Make a block recompute its activations during backward, in place.

    Args:
        block: A repeated layer, before it is compiled and wrapped by FSDP.
        mode: ``"full"``: everything; ``"selective"``: everything but matrix products and
            attention; with ``"none"`` nothing happens, and with ``"budget"`` ``compile_blocks``
            sees to it.
    """
    if mode in ("none", "budget"):
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = _selective_contexts

    # A function of this file: the compiler skips a bound `checkpoint`, which is torch's own,
    # and with it the block.
    def repeatable(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    wrap_forward(block, repeatable)


def tile_feed_forward(blocks: Iterable[nn.Module], tiles: int) -> None:
    """Divide the feed-forward of a ``Transformer``'s blocks into tiles of positions, in place."""
    for block in blocks:
        if isinstance(block, Block) and isinstance(block.feed_forward, FeedForward):
            block.mlp_tiles = tiles


def compile_blocks(
    blocks: Iterable[nn.Module],
    mode: ActivationCheckpoint = "none",
    *,
    memory_budget: float = 0.5,
    backend: str = "inductor",
) -> None:
    """Compile blocks, in place; with ``"budget"`` each keeps at most its share of activations.

    Args:
        blocks: Repeated layers; those that are alike share what is compiled.
        mode: What backward recomputes.
        memory_budget: Share of the bytes that a compiled block would keep for backward; the
            compiler recomputes what costs least until the rest fits.
        backend: A backend of ``torch.compile``.

    References:
        https://pytorch.org/blog/activation-checkpointing-techniques/
    """
    # One object for all blocks, so that equal blocks share compiled code.
    shared = partial(_within_budget, memory_budget, backend) if mode == "budget" else backend
    for block in blocks:
        block.compile(backend=shared)


def _within_budget(budget: float, backend: str, graph: Any, inputs: Any, **options: Any) -> Any:
    # The backend reads the setting at each call, when it partitions forward and backward; set
    # globally it would affect all else that a program compiles.
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    with config.patch({"activation_memory_budget": budget}):
        return lookup_backend(backend)(graph, inputs, **options)


def _selective_contexts() -> tuple[Any, Any]:
    """Return contexts of forward and recomputation, which keep and reuse expensive outputs."""
    # Torch's pair shares one storage; only the second context is replaced.
    first, again = create_selective_checkpoint_contexts(_keep_expensive)
    return first, _Again(again)


class _Again(_CachedTorchDispatchMode):
    """Recomputation context that reuses the kept outputs, and may run more than once.

    Torch's own counts every operation, and FSDP around a module inside of the block (experts)
    gathers and frees at other moments when the block is repeated. It hands out what was kept
    only once, and pipeline schedules that part the backward pass repeat a block for its inputs
    and once more for its weights.
    """

    def __init__(self, torch_mode: Any) -> None:
        vars(self).update(vars(torch_mode))
        self._kept = torch_mode.storage

    def __enter__(self) -> Any:
        # Outputs are popped from the lists, so each recomputation gets its own.
        self.storage = {op: copy.copy(values) for op, values in self._kept.items()}
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.storage = {}
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_expensive(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _keep_expensive(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_expensive(op: Any) -> bool:
    name = getattr(op, "__name__", "").split(".")[0]
    costly = {"mm", "addmm", "bmm", "_grouped_mm", "attend_ring", "attend_documents"}
    return name in costly or "scaled_dot_product" in name or "_attention" in name
