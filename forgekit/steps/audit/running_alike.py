"""That ranks run the same modules in the same order, compared where a run begins.

FSDP pairs the collectives of ranks by their order and by nothing else. Where one rank skips a block
that another runs, a block's shards meet those of another block, or ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from forgekit.parallel.agreement import exchange
from forgekit.parallel.fsdp import FsdpModules

END = "the end of loss_fn"


@contextmanager
def running_alike(model: nn.Module, sharded: FsdpModules, *, is_due: bool) -> Iterator[None]:
    """Compare each module that FSDP gathers inside the block before it is gathered, and the end.

    A small collective of objects each, which pairs with one of another rank whatever that one runs.

    Args:
        model: The model, whole on this rank.
        sharded: Its FSDP modules.
        is_due: Whether to compare.

    Raises:
        ValueError: On every rank, with what the ranks are about to run, if they differ.
    """
    if not is_due:
        yield
        return
    gathered = set(sharded)
    here = {name: module for name, module in model.named_modules() if module in gathered}
    # Ranks without experts have no module to gather there.
    everywhere = set(here).intersection(*exchange(list(here)))
    with ExitStack() as hooks:
        for name in everywhere:
            compare = partial(_compare, name or type(model).__name__)
            # In front of FSDP's own hook.
            hook = here[name].register_forward_pre_hook(compare, prepend=True)
            hooks.callback(hook.remove)
        yield
    _compare(END)


def runs_compiled(model: nn.Module) -> bool:
    """Whether the model, or a module in it, runs compiled code in place of its own forward."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _compare(name: str, *_: Any) -> None:
    everyone = exchange(name)
    if other := next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), 0):
        raise ValueError(
            f"ranks run different modules: rank 0 is at {everyone[0]} and rank {other} at "
            f"{everyone[other]}. FSDP pairs the collectives of ranks by their order, so that "
            "gradients would be wrong, or ranks wait for each other. Run the same modules on all "
            "ranks: draw blocks to skip from a torch.Generator with one seed for all of them."
        )
