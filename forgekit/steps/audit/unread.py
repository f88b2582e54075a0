"""What a loss reads of a teacher's rows: a field that nothing reads would teach nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forgekit.checks import quoted
from forgekit.data.batch import TEACHER
from forgekit.steps.losses import Loss, LossFn


class _Noting(Tensor):
    """A tensor that notes operations with it; what they return is plain."""

    note: Any = staticmethod(bool)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if isinstance(out, Tensor) or func.__name__ != "__get__":  # not for a shape or a dtype
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, cls):
                    one.note()
        return out


def note_reads(loss_fn: LossFn, is_read: dict[str, bool], model: Any, batch: Any) -> Loss:
    """Compute a loss, and note which of a teacher's fields it reads.

    Args:
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        is_read: By field that the micro-batch has, whether the loss has read it; changed in place.
        model: As for ``loss_fn``.
        batch: As for ``loss_fn``; not changed.
    """
    batch = batch.copy()
    for key in TEACHER:
        if type(batch.get(key, None)) is Tensor:  # others, such as fake ones, cannot note
            batch[key] = noting = batch[key].as_subclass(_Noting)
            is_read.setdefault(key, False)
            noting.note = partial(is_read.__setitem__, key, True)
    return loss_fn(model, batch)


def find_unread(is_read: Mapping[str, bool]) -> str | None:
    """Say which fields the loss has not read."""
    unread = quoted(key for key in is_read if not is_read[key])
    remedy = "Pass them to forgekit.sparse_kl, or prepare the data without a teacher's rows."
    problem = f"has {unread} in its micro-batches, which the loss does not read. {remedy}"
    return None if all(is_read.values()) else problem
