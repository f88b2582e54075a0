"""NF4: a matrix in four bits per value, as QLoRA stores a frozen base.

Blocks of 64 values are divided by their largest magnitude and rounded to the nearest of 16 levels.
The magnitudes are held in eight bits, 256 of them with one factor, around the mean of all. The bits
are those of ``torchao``'s ``to_nf4(weight, 64, 256)`` of a float32 weight.

torchao's tensor cannot be sharded unevenly, nor loaded where it is sharded: each rank would take
the mean of its own part. Here a matrix is a plain tensor of *pieces*, ``[p bytes]`` uint8, each
with all that its values need: FSDP shards and gathers it, and checkpoints keep it, like any other,
with the same bits in every layout.

References:
    QLoRA, https://arxiv.org/abs/2305.14314;
    https://github.com/pytorch/ao/tree/main/torchao/quantization/quantize_/workflows/nf4
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, GROUP = 64, 256
"""Values per magnitude; magnitudes per factor."""

PIECE = BLOCK * GROUP
"""Values per packed piece."""

LEVELS = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0),
)
CODES, SCALES, NUMBERS = PIECE // 2, GROUP, 4 * (2 + len(LEVELS))
"""Bytes of a piece: two codes each; magnitudes, int8; factor, mean and levels, float32."""

BYTES = CODES + SCALES + NUMBERS
CHUNK = 64
"""Pieces quantized at once: distances to all levels take 16 times their memory."""

UNPACKED = 256
"""Pieces unpacked at once, to hold little in float32."""


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix in NF4."""
    return tensor.dtype == torch.uint8 and tensor.ndim == 2 and tensor.shape[1] == BYTES


def values_in(tensor: Tensor) -> int:
    """Return the number of a tensor's values; for NF4 of the unpacked matrix."""
    return tensor.shape[0] * PIECE if is_packed(tensor) else tensor.numel()


@torch.no_grad()
def pack(weight: Tensor) -> Tensor:
    """Quantize a full matrix.

    Args:
        weight: Of any shape and floating dtype; on meta too. The number of values is divisible by
            16,384 (``PIECE``).

    Returns:
        ``[p 8520]`` uint8, a row for each 16,384 values in their order.
    """
    pieces = weight.numel() // PIECE
    if weight.is_meta:
        return torch.empty((pieces, BYTES), dtype=torch.uint8, device=weight.device)
    blocks = weight.detach().float().reshape(pieces, GROUP, BLOCK)
    magnitudes = blocks.abs().amax(-1)
    mean = magnitudes.flatten().mean()
    centred = magnitudes - mean
    factor = 256 / (2 * centred.abs().amax(-1, keepdim=True))
    scales = (centred * factor).round().clamp(-128, 127).to(torch.int8)
    levels = torch.tensor(LEVELS, device=weight.device)
    shares = (blocks / magnitudes[..., None]).split(CHUNK)
    pairs = torch.cat([_nearest(part, levels) for part in shares]).view(pieces, CODES, 2)
    codes = pairs[..., 0] << 4 | pairs[..., 1]
    numbers = torch.cat([factor, mean.expand(pieces, 1), levels.expand(pieces, -1)], 1)
    return torch.cat([codes, scales.view(torch.uint8), numbers.view(torch.uint8)], 1)


@torch.no_grad()
def unpack(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Restore a matrix, rounded to the levels.

    Args:
        packed: What ``pack`` returned, ``[p 8520]``.
        shape: Of the matrix.
        dtype: Of what is returned; computed in float32.
    """
    out = torch.empty((len(packed), GROUP, BLOCK), dtype=dtype, device=packed.device)
    for part, target in zip(packed.split(UNPACKED), out.split(UNPACKED), strict=True):
        codes, scales, numbers = part.split((CODES, SCALES, NUMBERS), 1)
        factor, mean, levels = numbers.view(torch.float32).split((1, 1, len(LEVELS)), 1)
        magnitudes = scales.view(torch.int8) / factor + mean
        # Two values at once, as eight bytes, looked up by the byte of their codes.
        pairs = torch.stack((levels[0].repeat_interleave(16), levels[0].repeat(16)), 1)
        both = pairs.view(torch.float64).flatten().index_select(0, codes.flatten().int())
        values = both.view(torch.float32).view(target.shape)
        target.copy_(values.mul_(magnitudes.unsqueeze(-1)))
    return out.view(shape)


def _nearest(blocks: Tensor, levels: Tensor) -> Tensor:
    """Return indices of the nearest levels, uint8; the first level for a block of zeros."""
    return (blocks.unsqueeze(-1) - levels).abs().min(-1).indices.to(torch.uint8)


class PackedLinear(torch.autograd.Function):
    """``x @ weight.T`` of a packed weight, which is unpacked again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, outputs: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``[n in]`` -> ``[n out]``."""
        ctx.save_for_backward(packed)
        ctx.shape = (outputs, x.shape[-1])
        return x @ unpack(packed, ctx.shape, x.dtype).t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``[n out]`` -> ``[n in]``."""
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, ctx.shape, gradient.dtype), None, None
