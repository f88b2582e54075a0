"""Key-value cache: a new position costs one position's work.

A cache is an ``attend`` socket for a while: it keeps what its attention computes, so no module of
the model knows of it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.model.attention import Attend
from forgekit.model.batch_invariant import attend_cached
from forgekit.model.transformer import Transformer, attentions


@attrs.define(eq=False)
class NewPositions:
    """Indices of the new positions, shared by all layers of a model.

    Attributes:
        room: Positions that a cache holds.
        count: Positions of each row under way, from the first on; more are padding.
        at: ``[b]`` position of the new one in each row; None while the prompts run.
        end: One more than the last position of any row.
        mask: ``[b 1 1 end]`` bool, which positions a row has; None while the prompts run.
    """

    room: int
    count: int = 0
    at: Tensor | None = None
    end: int = 0
    mask: Tensor | None = None


@attrs.define(eq=False)
class CachedAttend:
    """Attends from new positions to all earlier ones in their row.

    Attributes:
        attend: Attends within the prompts.
        new: The positions under way.
        attend_new: Attends from one new position of each row to those that are kept.
    """

    attend: Attend
    new: NewPositions
    attend_new: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    _keys: Tensor | None = attrs.field(default=None, init=False)
    _values: Tensor | None = attrs.field(default=None, init=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None) -> Tensor:
        """Store ``k`` and ``v``, ``[b s k c]``; attend from ``q``, ``[b s h c]``."""
        if self._keys is None or self._values is None:
            rows, _, heads, channels = k.shape
            shape = (rows, heads, self.new.room, channels)
            # Zeros: masked values are multiplied by zero, and uninitialised memory may hold NaN.
            self._keys, self._values = k.new_zeros(shape), v.new_zeros(shape)
        self._write(self._keys, k)
        self._write(self._values, v)
        if self.new.mask is None:
            return self.attend(q, k, v, doc_ids=doc_ids)
        rows, positions, heads, channels = q.shape
        # Query heads that share keys become queries of one head, without repeats. [b k g*s c]
        shared = q.transpose(1, 2).reshape(rows, k.shape[2], -1, channels)
        keys, values = (x[:, :, : self.new.end] for x in (self._keys, self._values))
        attended = self.attend_new(shared, keys, values, self.new.mask)
        return attended.reshape(rows, heads, positions, channels).transpose(1, 2)

    def _write(self, kept: Tensor, x: Tensor) -> None:
        new = self.new
        if new.at is None:
            kept[:, :, : new.count] = x[:, : new.count].transpose(1, 2)
        else:
            kept[torch.arange(len(x), device=x.device), :, new.at] = x[:, 0]


def is_batch_invariant(model: nn.Module) -> bool:
    """Whether a token's bits do not depend on the rest of the batch."""
    return isinstance(model, Transformer) and model.batch_invariant


def cache_sockets(model: nn.Module, new: NewPositions) -> dict[str, dict[str, CachedAttend]]:
    """Build caching ``attend`` sockets by module name; see ``attentions``."""
    attend_new = attend_cached if is_batch_invariant(model) else F.scaled_dot_product_attention
    named = attentions(model).items()
    return {name: {"attend": CachedAttend(m.attend, new, attend_new)} for name, m in named}
