"""What a loss function reads of a teacher's rows: a field that it does not read teaches nothing."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from forgekit.checks import quoted
from forgekit.data.batch import TEACHER
from forgekit.steps.losses import Loss, LossFn


class _Noting(Tensor):
    """A tensor that notes the first operation with it; results are plain tensors."""

    note: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, cls) and one.note is not None:
                one.note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def note_reads(
    loss_fn: LossFn, is_read: dict[str, bool], model: nn.Module, batch: TensorDictBase
) -> Loss:
    """Compute a loss, and note which of a teacher's fields of the micro-batch it reads.

    Args:
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        is_read: By field of the micro-batches so far, whether a loss has read it; changed in place.
        model: As for ``loss_fn``.
        batch: As for ``loss_fn``; not changed.
    """
    batch = batch.copy()
    for key in TEACHER:
        if type(batch.get(key, None)) is Tensor:  # others, such as fake ones, cannot note
            batch[key] = noting = batch[key].as_subclass(_Noting)
            is_read.setdefault(key, False)
            noting.note = lambda key=key: is_read.update({key: True})
    return loss_fn(model, batch)


def find_unread(is_read: dict[str, bool]) -> str | None:
    """Say which fields no loss of a step has read."""
    if not (unread := [key for key in is_read if not is_read[key]]):
        return None
    return (
        f"has {quoted(unread)} in its micro-batches, which the loss does not read. Pass them to "
        "forgekit.sparse_kl, or prepare the data without a teacher's rows."
    )
