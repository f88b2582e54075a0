"""Layers with a low-rank adapter: a frozen matrix and two trained thin factors.

The factors are parameters of the layer itself, beside its weight, so that every parameter of the
base keeps its name. Where ranks share the layer, ``parallelize`` shards the factors with it and
replaces two sockets, ``add_up`` and ``drop``.

References:
    LoRA, https://arxiv.org/abs/2106.09685; rsLoRA, https://arxiv.org/abs/2312.03732;
    DoRA, https://arxiv.org/abs/2402.09353
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from attrs import field
from attrs.validators import ge, gt, lt
from torch import Tensor, nn

from forgekit.model.initial import seed_of
from forgekit.model.moe import ALIGNMENT, Experts, Multiply
from forgekit.model.nf4 import PackedLinear, is_packed, pack, unpack
from forgekit.tensors import full, wide

WHOLE_FACTORS = MappingProxyType({0: ("lora_A",), 1: ("lora_B", "lora_magnitude_vector")})
"""Replicated parameters of an adapter, by the sharded dimension of the weight."""


@attrs.frozen(kw_only=True)
class Adapter:
    """The adapter of one matrix: ``weight + scale * B @ A``.

    Attributes:
        name: The matrix's, in the whole model; with ``seed`` it decides the initial values.
        rank: Rows of ``A``, columns of ``B``.
        alpha: ``scale`` times the rank, or times its root with ``rslora``.
        dropout: Probability on what ``A`` takes, in training.
        dora: Whether each row of the sum is scaled to a length that is trained.
        rslora: Whether the scale falls with the root of the rank.
        seed: Seed of the initial values.

    Raises:
        ValueError: If a number is out of range.
    """

    name: str
    rank: int = field(validator=ge(1))
    alpha: float = field(validator=gt(0))  # a zero scale would disable the adapter
    dropout: float = field(default=0.0, validator=(ge(0), lt(1)))
    dora: bool = False
    rslora: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        """Factor of the product ``B @ A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def draw(self, shape: torch.Size, restart: int = 0) -> Tensor:
        """Draw the whole of ``A``, uniformly in ``+-1 / sqrt(in)``, float32 in host memory.

        Args:
            shape: ``[... r in]``.
            restart: Another number, other values; 0 at first.
        """
        name = f"{self.name}.lora_A" + (f"/{restart}" if restart else "")
        generator = torch.Generator("cpu").manual_seed(seed_of(self.seed, name))
        values = torch.rand(shape, generator=generator, device="cpu")
        return values.mul_(2).sub_(1).div_(math.sqrt(shape[-1]))


def _initial_adapters(layer: Any, restart: int = 0) -> dict[str, Callable[[], Tensor]]:
    """Return full initial values of a layer's adapters, by name; see ``init_weights``."""
    values: dict[str, Callable[[], Tensor]] = {}
    for matrix, adapter in layer.adapters.items():
        low, high, magnitude = layer.factor_names(matrix)
        values[low] = partial(adapter.draw, getattr(layer, low).shape, restart)
        values[high] = partial(torch.zeros, getattr(layer, high).shape, device="cpu")
        if magnitude is not None:
            values[magnitude] = partial(_row_lengths, layer)
    return values


class LoraLinear(nn.Linear):
    """``nn.Linear`` with an adapter; ``of`` makes one to replace a layer.

    Attributes:
        adapters: The adapter under ``"weight"``; a socket: without it the base computes alone.
        bases: The weight's values before it was merged, this rank's; empty while it is not.
        merged: The merged form of a packed weight, sharded alike; None while unmerged.
        full_dtype: Of the weight before it was packed.
        lora_A: ``[r in]``.
        lora_B: ``[out r]``.
        lora_magnitude_vector: ``[out]``, lengths of rows (DoRA); None without.
        add_up: Socket: sums of squares of a rank's columns -> of whole rows.
        drop: Socket: ``drop(x, p)``, dropout on what this rank holds of the input.
    """

    adapters: dict[str, Adapter]
    bases: dict[str, Tensor]
    merged: Tensor | None
    full_dtype: torch.dtype
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter | None
    add_up: Callable[[Tensor], Tensor]
    drop: Callable[[Tensor, float], Tensor]

    @classmethod
    def of(cls, layer: nn.Module, adapter: Adapter, *, packs: bool = False) -> LoraLinear:
        """Make a layer with another's parameters and hooks, and an adapter that adds zero.

        Args:
            layer: A linear layer.
            adapter: The adapter.
            packs: Whether the weight is packed into NF4.
        """
        lora: Any = _swap_class(layer, cls)
        lora.adapters, lora.bases = {"weight": adapter}, {}
        lora.add_up, lora.drop = _same, F.dropout
        low, high = (adapter.rank, lora.in_features), (lora.out_features, adapter.rank)
        lora.lora_A, lora.lora_B = (_new(lora.weight, shape) for shape in (low, high))
        magnitude = _new(lora.weight, high[:1]) if adapter.dora else None
        lora.register_parameter("lora_magnitude_vector", magnitude)
        lora.full_dtype, lora.merged = lora.weight.dtype, None
        if packs:
            lora.weight = nn.Parameter(pack(lora.weight), requires_grad=False)
        _fill(lora, "weight")
        return lora

    def forward(self, input: Tensor) -> Tensor:
        """``[... in]`` -> ``[... out]``."""
        if self.merged is not None:
            return F.linear(input, full(self.merged).to(input.dtype), self.bias)
        if self.bases or not self.adapters:
            return self._multiply(input, self.bias)
        x, adapter = input, self.adapters["weight"]
        rows = x.reshape(-1, x.shape[-1])
        is_dropped = self.training and adapter.dropout > 0
        kept = self.drop(rows, adapter.dropout) if is_dropped else rows
        low = F.linear(kept, self.lora_A.to(x.dtype))
        out = self._multiply(rows, None if adapter.dora else self.bias)
        # A fused multiply-add: no further pass over the output for scale and sum.
        out = torch.addmm(out, low, self.lora_B.to(x.dtype).t(), alpha=adapter.scale)
        if self.lora_magnitude_vector is not None:
            out = out * self._stretch(self.lora_magnitude_vector).to(x.dtype)
            out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def adapted_weight(self) -> Tensor:
        """Return the effective weight, ``[out in]``, differentiable."""
        low, high = self.lora_A.to(self.weight.dtype), self.lora_B.to(self.weight.dtype)
        adapted = self.weight + self.adapters["weight"].scale * (high @ low)
        if self.lora_magnitude_vector is None:
            return adapted
        stretch = self._stretch(self.lora_magnitude_vector)
        return adapted * stretch.to(adapted.dtype).unsqueeze(-1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weight; for a packed one its unpacked dtype."""
        return self.full_dtype if is_packed(self.weight) else self.weight.dtype

    def whole_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the base's weight, unpacked, ``[out in]``, gathered if FSDP has sharded it."""
        weight = full(self.weight.detach())
        if not is_packed(weight):
            return weight.to(dtype)
        return unpack(weight, (self.out_features, self.in_features), dtype)

    def factor_names(self, matrix: str) -> tuple[str, str, str | None]:
        """Return the names of a matrix's ``A``, ``B`` and magnitude."""
        magnitude = "lora_magnitude_vector" if self.adapters[matrix].dora else None
        return "lora_A", "lora_B", magnitude

    initial_adapters = _initial_adapters

    def _multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply rows, ``[... in]``, by the base's weight -> ``[... out]``."""
        if not is_packed(self.weight):
            return F.linear(rows, self.weight, bias)
        flat = rows.reshape(-1, self.in_features)
        out: Tensor = PackedLinear.apply(flat, self.weight, self.out_features)  # pyright: ignore[reportAssignmentType]
        out = out.view(*rows.shape[:-1], self.out_features)
        return out if bias is None else out + bias

    def _stretch(self, magnitude: Tensor) -> Tensor:
        """Compute DoRA's factor of each row, ``[out]``; only the magnitude gets gradients."""
        with torch.no_grad():
            dtype = wide(self.dtype)
            delta = self.lora_B.to(dtype) @ self.lora_A.to(dtype)
            rows = self.whole_weight(dtype) + self.adapters["weight"].scale * delta
            lengths = self.add_up(rows.square().sum(-1)).sqrt()
        return magnitude.to(dtype) / lengths


class LoraExperts(Experts):
    """Experts with an adapter each; ``of`` makes them from experts.

    Attributes:
        adapters: By stack, ``"gate"``, ``"up"`` or ``"down"``; a socket, as that of a linear layer.
            Factors are ``<stack>_lora_A`` ``[e r in]`` and ``<stack>_lora_B`` ``[e out r]``.
        bases: By stack its values before it was merged, this rank's; empty while none is.
        widths: See ``Experts``; here those of the factors too.
    """

    adapters: dict[str, Adapter]
    bases: dict[str, Tensor]

    @classmethod
    def of(cls, experts: Experts) -> LoraExperts:
        """Make experts with others' parameters and hooks, without adapters yet."""
        lora: Any = _swap_class(experts, cls)
        lora.adapters, lora.bases = {}, {}
        return lora

    def add_adapter(self, stack: str, adapter: Adapter) -> None:
        """Add adapters that add zero to a stack, in place."""
        weight = getattr(self, stack)
        count, outputs, inputs = weight.shape
        self.register_parameter(f"{stack}_lora_A", _new(weight, (count, adapter.rank, inputs)))
        self.register_parameter(f"{stack}_lora_B", _new(weight, (count, outputs, adapter.rank)))
        self.adapters[stack] = adapter
        # TP shards one dimension; the factor without it is replicated.
        by_rows = self.widths[stack] == 1
        low, high = (None, 1) if by_rows else (2, None)
        self.widths = {**self.widths, f"{stack}_lora_A": low, f"{stack}_lora_B": high}
        _fill(self, stack)

    def project(self, stack: str, rows: Tensor, multiply: Multiply) -> Tensor:
        """Multiply rows by their expert's adapted matrix."""
        out = super().project(stack, rows, multiply)
        if stack not in self.adapters or self.bases:
            return out
        low, high = (getattr(self, name).to(rows.dtype) for name in self.factor_names(stack)[:2])
        if short := -low.shape[1] % (ALIGNMENT // rows.element_size()):
            # Zeros up to strides that the grouped product supports.
            low, high = F.pad(low, (0, 0, 0, short)), F.pad(high, (0, short))
        return out + multiply(multiply(rows, low), high) * self.adapters[stack].scale

    def factor_names(self, matrix: str) -> tuple[str, str, str | None]:
        """Return the names of a stack's ``A`` and ``B``; there is no magnitude."""
        return f"{matrix}_lora_A", f"{matrix}_lora_B", None

    initial_adapters = _initial_adapters


def _swap_class(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Swap a module's class in a copy that shares its parameters, hooks and names."""
    copy = kind.__new__(kind)
    vars(copy).update(vars(module) | {"_parameters": dict(module._parameters)})
    return copy


LoraLayer = LoraLinear | LoraExperts


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return this rank's layers with adapters, by name."""
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, LoraLayer)}


def check_unmerged(model: nn.Module, why: str) -> list[LoraLayer]:
    """List a model's layers with adapters; raise if they are merged.

    Args:
        model: The model.
        why: What would go wrong otherwise.
    """
    layers = lora_layers(model)
    if merged := [name for name, layer in layers.items() if layer.bases]:
        raise ValueError(
            f"the adapters of {len(merged)} layers (first: {merged[0]!r}) are merged into their "
            f"weights: {why}. Call forgekit.unmerge_lora(model) first."
        )
    return list(layers.values())


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of this rank's adapter parameters."""
    return [
        f"{name}.{leaf}".lstrip(".")
        for name, layer in lora_layers(model).items()
        for matrix in layer.adapters
        for leaf in layer.factor_names(matrix)
        if leaf is not None
    ]


def weight_of(layer: nn.Linear) -> Tensor:
    """Return the effective weight of a linear layer that is read instead of called."""
    if isinstance(layer, LoraLinear) and layer.adapters and not layer.bases:
        return layer.adapted_weight()
    return layer.weight


@torch.no_grad()
def merged_weight(layer: LoraLayer, matrix: str) -> Tensor:
    """Add an adapter to its full matrix in float32 or wider; the same bits in every layout.

    Args:
        layer: A layer with adapters, its base unpacked where it is packed.
        matrix: Name of the matrix in it.

    Returns:
        ``[out in]``, of experts ``[e out in]``, gathered on every rank that shares it.
    """
    names = layer.factor_names(matrix)
    low, high = (full(getattr(layer, name)) for name in names[:2])
    if isinstance(layer, LoraLinear):
        weight = layer.whole_weight(wide(layer.dtype))
    else:
        weight = full(getattr(layer, matrix))
        weight = weight.to(wide(weight.dtype))
    merged = weight + layer.adapters[matrix].scale * (high.to(weight.dtype) @ low.to(weight.dtype))
    if names[2] is not None:
        magnitude = full(getattr(layer, names[2])).to(merged.dtype)
        merged *= (magnitude / torch.linalg.vector_norm(merged, dim=-1)).unsqueeze(-1)
    return merged


def _same(values: Tensor) -> Tensor:
    return values


def _new(weight: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """Make a trainable parameter like a weight; float32 for 16-bit ones, to resolve updates."""
    return nn.Parameter(torch.empty(shape, dtype=wide(weight.dtype), device=weight.device))


@torch.no_grad()
def _fill(layer: LoraLayer, matrix: str) -> None:
    """Initialise a new adapter, in place; on meta ``parallelize`` does it."""
    initial = layer.initial_adapters()
    for name in layer.factor_names(matrix):
        if name is not None and not (parameter := getattr(layer, name)).is_meta:
            parameter.copy_(initial[name]())


def _row_lengths(layer: Any) -> Tensor:
    """Compute row norms of the gathered full weight; the same bits in every layout."""
    weight = layer.whole_weight(wide(layer.dtype))
    return torch.linalg.vector_norm(weight, dim=-1).cpu()
