"""Block attention: queries attend to some keys, as one term of a softmax over more.

Each block gives its own normalised output and the logarithm of its weight, from which blocks are
merged; backward takes output and weight of the *whole* softmax and gives the block's share of the
gradients. Statistics are float32 or wider. A flash kernel does the work where there is one, torch's
for a CPU or that of the device; elsewhere a plain product, whose scores the caller bounds by giving
few queries at a time.

References:
    FlashAttention-2, https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from forgekit.model.attention_kernels import Kernel
from forgekit.tensors import wide

Ids = tuple[Tensor, Tensor]
"""Document ids of a block's queries, ``[b m]``, and of its keys, ``[b n]``."""


def has_flash(tensor: Tensor) -> bool:
    """Whether blocks on this tensor's device run in a flash kernel, which never holds scores."""
    return tensor.device.type == "cpu"


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, offset: int | None, ids: Ids | None, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Attend from a block of queries to a block of keys.

    Args:
        q: ``[b h m c]`` queries.
        k: ``[b k n c]`` keys; ``k`` divides ``h``.
        v: ``[b k n c]`` values.
        offset: Position of the first query among the keys: query ``i`` sees the keys up to
            ``i + offset``. None where all keys come before.
        ids: Documents; a query sees the keys of its own. None for one document.
        kernel: ``"flash"``: the device's, for one document and whole or causal squares.

    Returns:
        ``[b h m c]`` output, zero where a query sees no key, and ``[b h m]`` logarithm of the sum
        of exponentials in float32 or wider, there minus infinity.
    """
    if kernel == "flash":
        return _flash(q, k, v, is_causal=offset == 0)
    if not has_flash(q):
        return _plain(q, k, v, _mask(q, k, offset, ids))
    causal, mask, bias = _cpu_mask(q, k, offset, ids)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, causal, attn_mask=bias)
    if mask is not None:  # the kernel returns 0 where nothing is attended
        lse = lse.masked_fill(~mask.any(-1), float("-inf"))
    return out, lse


def attend_block_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offset: int | None,
    ids: Ids | None,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a block's share of the gradients of the whole softmax.

    Args:
        gradient: ``[b h m c]`` gradient of the merged output.
        q: As for ``attend_block``.
        k: As for ``attend_block``.
        v: As for ``attend_block``.
        out: ``[b h m c]`` merged output.
        lse: ``[b h m]`` merged logarithm of the sum of exponentials; finite.
        offset: As for ``attend_block``.
        ids: As for ``attend_block``.
        kernel: As for ``attend_block``.

    Returns:
        Shares of the gradients of ``q``, ``k`` and ``v``, in their dtype or wider.
    """
    if kernel == "flash":
        return _flash_backward(gradient, q, k, v, out, lse, is_causal=offset == 0)
    if not has_flash(q):
        return _plain_backward(gradient, q, k, v, out, lse, _mask(q, k, offset, ids))
    causal, _, bias = _cpu_mask(q, k, offset, ids)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(gradient, q, k, v, out, lse, 0.0, causal, attn_mask=bias)


def merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block into a softmax, in place.

    Args:
        out: ``[b h m c]`` output so far, float32 or wider; zeros at first.
        lse: ``[b h m]`` logarithm of the sum of exponentials so far; minus infinity at first. At
            each position this or the block's must be finite.
        block_out: ``[b h m c]`` output of the block.
        block_lse: ``[b h m]`` its logarithm of the sum of exponentials.
    """
    # Two softmaxes of the same queries over other keys: exp(lse) is each one's weight. Both -inf
    # would give NaN, so a position's own block comes first.
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(block_out.to(out.dtype), (block_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _mask(q: Tensor, k: Tensor, offset: int | None, ids: Ids | None) -> Tensor | None:
    """Return ``[b 1 m n]`` bool, the pairs that may attend; None for all."""
    same = None if ids is None else ids[0][:, None, :, None] == ids[1][:, None, None, :]
    if offset is None:
        return same
    pairs = (1, 1, q.shape[2], k.shape[2])
    before = torch.ones(pairs, dtype=torch.bool, device=q.device).tril_(offset)
    return before if same is None else same & before


def _cpu_mask(
    q: Tensor, k: Tensor, offset: int | None, ids: Ids | None
) -> tuple[bool, Tensor | None, Tensor | None]:
    """Whether the kernel's own causal mask suffices, at no cost; else an additive mask."""
    if offset == 0 and ids is None and q.shape[2] == k.shape[2]:
        return True, None, None
    mask = _mask(q, k, offset, ids)
    if mask is None:
        return False, None, None
    # The kernel takes only additive masks in the dtype of the queries.
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    return False, mask, bias


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    lengths = None, None, q.shape[2], k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    flash = torch.ops.aten._flash_attention_forward
    out, lse, *_ = flash(q, k, v, *lengths, 0.0, is_causal, False)
    return out.transpose(1, 2), lse


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Dropout state, unused; torch.nn.attention.varlen passes the same.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    given = (x.transpose(1, 2) for x in (gradient, q, k, v, out))
    flash = torch.ops.aten._flash_attention_backward
    shares = flash(*given, lse.contiguous(), *lengths, 0.0, is_causal, state, unused)
    dq, dk, dv = (x.transpose(1, 2) for x in shares)
    return dq, dk, dv


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    # Without keys: exp(-inf + inf) would be NaN, exp(-inf + max) is 0.
    weights = scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min)).exp_()
    out = weights @ v.to(weights.dtype)
    return _ungrouped(out, q, k), _ungrouped(lse, q, k).squeeze(-1)


def _plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, out, queries, lse = (_grouped(x, k) for x in (gradient, out, q, lse.unsqueeze(-1)))
    weights = _scores(q, k, mask).sub_(lse).exp_()
    dv = weights.mT @ gradient
    # dS = P * (dP - rowsum(dO * O)), with P and O of the whole softmax, so blocks add up.
    inner = (gradient * out).sum(-1, keepdim=True)
    shares = (gradient @ v.to(gradient.dtype).mT).sub_(inner).mul_(weights)
    shares *= q.shape[-1] ** -0.5
    return _ungrouped(shares @ k.to(shares.dtype), q, k), shares.mT @ queries, dv


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Compute ``[b k (g m) n]`` scores; queries of a key head lie side by side, no key repeats."""
    # In float32 or wider: 16-bit scores would be rounded before the softmax.
    queries = _grouped(q, k)
    scores = (queries * q.shape[-1] ** -0.5) @ k.to(queries.dtype).mT
    if mask is not None:
        by_head = scores.unflatten(2, (-1, q.shape[2]))
        by_head.masked_fill_(~mask.unsqueeze(2), float("-inf"))
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    x = x.to(wide(x.dtype))
    return rearrange(x, "b (k g) m c -> b k (g m) c", k=k.shape[1])


def _ungrouped(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return rearrange(x, "b k (g m) c -> b (k g) m c", g=q.shape[1] // k.shape[1])
