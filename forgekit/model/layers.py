"""Parts of a transformer block: rotary embedding, attention, gated feed-forward, the block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forgekit.model.attention import Attend, attend_causal
from forgekit.model.rope_scaling import RopeScaling, rotary_frequencies

Rows = Callable[..., Tensor]
"""``rows(module, x)`` calls a position-wise module on ``[b s ...]``."""


def at_once(module: nn.Module, x: Tensor, *options: Any) -> Tensor:
    """Call a position-wise module on all positions, ``[b s ...]``."""
    return module(x, *options)


def rotary_angles(
    position_ids: Tensor, channels: int, theta: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Compute the rotation angle of each pair of channels at each position.

    Computed in float64: at position 100,000 a float32 angle is off by 4e-3 radians.

    Args:
        position_ids: ``[s]`` or ``[b s]`` int.
        channels: Channels per head, ``c``.
        theta: Base of the wavelengths.
        scaling: For longer sequences than the model began with.

    Returns:
        ``[s c/2]`` or ``[b s c/2]`` float64.

    References:
        RoFormer, https://arxiv.org/abs/2104.09864
    """
    frequencies = rotary_frequencies(channels, theta, scaling, position_ids.device)
    return position_ids.double()[..., None] * frequencies


def rotary_turns(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factors of ``rotate`` for both channels of each pair.

    Args:
        angles: ``[s c/2]`` or ``[b s c/2]``.

    Returns:
        ``[s 1 c]`` or ``[b s 1 c]``: cosines, and sines, those of the first half negative.
    """
    cos, sin = angles.cos(), angles.sin()
    turns = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return turns[0].unsqueeze(-2), turns[1].unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair ``(i, i + c/2)`` of channels by its angle.

    Args:
        x: ``[b s h c]``.
        cos: What ``rotary_turns`` returned.
        sin: The same, its second.

    Returns:
        ``[b s h c]`` in the dtype of ``x``.
    """
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and, optionally, normalised queries and keys.

    ``attend`` is a socket: a plain callable that ``parallelize`` replaces where a sequence is
    spread over ranks. ``rows`` is one too, through which the modules inside are called.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.channels = dim // heads if head_dim is None else head_dim
        self.query = nn.Linear(dim, heads * self.channels, bias=qkv_bias)
        self.key = nn.Linear(dim, kv_heads * self.channels, bias=qkv_bias)
        self.value = nn.Linear(dim, kv_heads * self.channels, bias=qkv_bias)
        self.output = nn.Linear(heads * self.channels, dim, bias=False)
        self.query_norm = nn.RMSNorm(self.channels, eps=norm_eps) if qk_norm else None
        self.key_norm = nn.RMSNorm(self.channels, eps=norm_eps) if qk_norm else None
        self.attend: Attend = attend_causal
        self.rows: Rows = at_once

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """``[b s d]`` -> ``[b s d]``."""
        q, k, v = (
            self.rows(project, x).unflatten(-1, (-1, self.channels))  # [b s h c]
            for project in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.rows(self.query_norm, q), self.rows(self.key_norm, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = self.attend(q, k, v, doc_ids=doc_ids)
        return self.rows(self.output, attended.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``.

    References:
        GLU variants improve transformer, https://arxiv.org/abs/2002.05202
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)
        self.activation: Callable[[Tensor], Tensor] = F.silu

    def forward(self, x: Tensor) -> Tensor:
        """``[b s d]`` -> ``[b s d]``."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward, each with dropout on its branch.

    The feed-forward, with its norm, runs in ``mlp_tiles`` tiles of positions.
    """

    def __init__(
        self,
        dim: int,
        attention: Attention,
        feed_forward: nn.Module,
        *,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.feed_forward_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)
        self.mlp_tiles = 1
        self.rows: Rows = at_once

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        doc_ids: Tensor | None = None,
        *routing: Any,
    ) -> Tensor:
        """``[b s d]`` -> ``[b s d]``; ``routing`` is what a feed-forward of experts takes."""
        normed = self.rows(self.attention_norm, x)
        x = x + self.dropout(self.attention(normed, cos, sin, doc_ids))
        if self.mlp_tiles > 1:
            return x + self.dropout(in_tiles(self._feed_forward, x, self.mlp_tiles))
        return x + self.dropout(self._feed_forward(x, *routing))

    def _feed_forward(self, x: Tensor, *routing: Any) -> Tensor:
        return self.rows(self.feed_forward, self.rows(self.feed_forward_norm, x), *routing)


def in_tiles(forward: Callable[[Tensor], Tensor], x: Tensor, tiles: int) -> Tensor:
    """Call a position-wise function by tiles of positions, and again for each in backward.

    So only one tile's intermediate values exist at a time.

    Args:
        forward: ``[b s d] -> [b s d]``.
        x: ``[b s d]``.
        tiles: Number of tiles, of sizes that differ by one at most; no more than ``s`` are made.

    References:
        Arctic long sequence training, https://arxiv.org/abs/2506.13996
    """
    parts = x.tensor_split(min(tiles, x.shape[1]), 1)
    if torch.is_grad_enabled():
        forward = partial(checkpoint, forward, use_reentrant=False)
    return torch.cat([forward(part) for part in parts], 1)
