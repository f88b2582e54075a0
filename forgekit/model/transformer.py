"""A decoder-only transformer that knows nothing of ranks.

Attention and position ids are sockets, plain callables which ``parallelize`` replaces; the output
projection can be replaced for one call (``head``), so that a loss may read the gathered output
weight inside ``forward`` and never build all logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.inputs import brief, check_integers, is_integer, is_number, nearest_multiples
from forgekit.model.initial import init_weights
from forgekit.model.layers import Attention, Block, FeedForward, rotary_angles, rotary_turns
from forgekit.model.lora import weight_of
from forgekit.model.moe import MoE
from forgekit.model.moe_spec import MoESpec
from forgekit.model.rope_scaling import RopeScaling
from forgekit.model.routing import Routing, check_choices

INITIAL_STD = 0.02

INTO_STREAM = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "feed_forward.shared.down.weight",
    "feed_forward.experts.down",
)
"""Ends of the names of projections back into the residual stream."""

LARGEST_SIZE = 2**31
"""No size of a model is near it; more fails while memory is reserved, or does not end."""

MOST_LAYERS = 100_000


@attrs.frozen(kw_only=True)
class TransformerSpec:
    """Sizes of a ``Transformer``.

    Attributes:
        vocab_size: Number of token ids, ``v``.
        dim: Width of the residual stream, ``d``.
        layers: Number of blocks.
        heads: Query heads, ``h``; divides ``dim`` where ``head_dim`` is None.
        kv_heads: Key and value heads, ``k``; divides ``heads``.
        ffn_dim: Width of the feed-forward, ``f``; with experts, of blocks that have none.
        max_seq_len: Longest sequence that is accepted, in positions.
        dropout: Probability on the embedding and on each residual branch, in [0, 1).
        qk_norm: Whether queries and keys are normalised per head.
        tied: Whether the output projection is the embedding.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in each RMSNorm.
        moe: Experts in place of feed-forwards; None for a dense model.
        head_dim: Channels per head, ``c``; ``dim / heads`` if None.
        rope_scaling: Of rotary frequencies for longer sequences; None for none.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    max_seq_len: int
    dropout: float = 0.0
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    moe: MoESpec | None = None
    head_dim: int | None = None
    rope_scaling: RopeScaling | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "max_seq_len"):
            value = getattr(self, name)
            if not is_integer(value):
                raise TypeError(f"{name} is {brief(value)}; it must be an integer.")
            if value < 1:
                raise ValueError(f"{name} is {brief(value)}; it must be at least 1.")
            if value > (most := MOST_LAYERS if name == "layers" else LARGEST_SIZE):
                raise ValueError(f"{name} is {brief(value)}; it must be at most {most:,}.")
        for name in ("dropout", "rope_theta", "norm_eps"):
            if not is_number(getattr(self, name)):
                raise TypeError(f"{name} is {brief(getattr(self, name))}; it must be a number.")
        self._check_channels()
        if self.heads % self.kv_heads:
            fitting = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(
                f"kv_heads {self.kv_heads} must divide heads {self.heads}; it can be one of "
                f"{fitting}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} must be at least 0 and below 1.")
        if not 0.0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta is {self.rope_theta}; it must be positive and finite.")
        if not 0.0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps is {self.norm_eps}; it must be finite and not negative.")
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise TypeError(
                f"rope_scaling is {brief(self.rope_scaling)}; pass a forgekit.RopeScaling."
            )
        self._check_moe()

    @property
    def channels(self) -> int:
        """Channels per head, ``c``."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def routed(self) -> dict[int, str]:
        """Names of the layers that have experts, by block."""
        blocks = range(self.layers) if self.moe is not None else ()
        return {
            block: f"layers.{block}.feed_forward"
            for block in blocks
            if self.moe is not None and self.moe.is_routed(block)
        }

    def _check_channels(self) -> None:
        if self.head_dim is not None:
            check_integers(head_dim=(self.head_dim, 2, LARGEST_SIZE))
            if self.head_dim % 2:
                raise ValueError(
                    f"head_dim {self.head_dim} must be even, so that rotary embedding can pair the "
                    f"channels of a head; {nearest_multiples(self.head_dim, 2)}."
                )
        elif self.dim % (2 * self.heads):
            step = 2 * self.heads
            raise ValueError(
                f"dim {self.dim} must be divisible by 2 * heads = {step}, so that rotary "
                f"embedding can pair the channels of a head; {nearest_multiples(self.dim, step)}."
            )

    def _check_moe(self) -> None:
        if self.moe is None:
            return
        if not isinstance(self.moe, MoESpec):
            raise TypeError(f"moe is {brief(self.moe)}; pass a forgekit.MoESpec.")
        if self.moe.first >= self.layers:
            raise ValueError(
                f"moe.first is {self.moe.first} and layers {self.layers}: no block would have "
                f"experts. Blocks are counted from 0 to {self.layers - 1}."
            )


def locate_all(positions: int, device: torch.device) -> Tensor:
    """Position ids of a rank that holds whole sequences: ``0 .. positions - 1``, ``[s]`` int64."""
    return torch.arange(positions, device=device)


class Transformer(nn.Module):
    """Token ids to logits: RMSNorm, rotary grouped-query attention, SwiGLU.

    Args:
        spec: Sizes.
        seed: Seed of the initial weights. On the meta device nothing is filled; ``parallelize``
            does it, to bitwise the same values.

    Examples:
        >>> spec = TransformerSpec(vocab_size=8, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32,
        ...                        max_seq_len=4)
        >>> Transformer(spec)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, spec: TransformerSpec, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(spec, TransformerSpec):
            raise TypeError(f"spec is {brief(spec)}; pass a forgekit.TransformerSpec.")
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.dropout = nn.Dropout(spec.dropout)
        self.layers = nn.ModuleList(_block(spec, layer) for layer in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.output = None if spec.tied else nn.Linear(spec.dim, spec.vocab_size, bias=False)
        self.locate: Callable[[int, torch.device], Tensor] = locate_all
        if not self.embedding.weight.is_meta:
            init_weights(self, seed)

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
        head: Callable[[Tensor, Tensor], Any] | None = None,
        targets: Tensor | None = None,
        replay: Mapping[str, Tensor] | None = None,
        routing: Routing | None = None,
    ) -> Any:
        """Compute logits, or whatever ``head`` makes of the last hidden states.

        Args:
            input_ids: ``[b s]`` int.
            position_ids: ``[b s]`` or ``[s]`` int rotary positions; ``locate`` gives them if None.
            doc_ids: ``[b s]`` int document of each position, -1 on padding. Attention stays inside
                a document. Rotary positions are relative, so they need not restart.
            head: ``head(hidden, weight)`` in place of the output projection, with ``hidden``
                ``[b s d]`` and ``weight`` ``[v d]``, for example a chunked loss.
            targets: ``[b s]`` bool, where the routers' auxiliary losses are summed; on every
                position that is no padding if None. Without effect on a dense model.
            replay: ``[b s k]`` int experts by layer, such as ``"layers.0.feed_forward"``: used in
                place of the routers' own choice, and weighed by them.
            routing: What ``accumulate`` gives each call: the loss scale, and where to note counts.

        Returns:
            ``[b s v]`` logits, or what ``head`` returned.

        Raises:
            ValueError: If the sequence is longer than ``max_seq_len``, or ``replay`` is none for
                this model and these ids.
        """
        positions = input_ids.shape[1]
        if positions > self.spec.max_seq_len:
            raise ValueError(
                f"input_ids has {positions} positions; max_seq_len is {self.spec.max_seq_len}. "
                "Shorten the sequences or build the model with a larger max_seq_len."
            )
        if position_ids is None:
            position_ids = self.locate(positions, input_ids.device)
        x = self.dropout(self.embedding(input_ids))
        cos, sin = self._rotary(position_ids, x.dtype)
        routing = self._routing(routing, input_ids, doc_ids, targets, replay)
        routed = self.spec.routed
        for block, layer in enumerate(self.layers):
            x = layer(x, cos, sin, doc_ids, *((routing,) if block in routed else ()))
        x = self.norm(x)
        weight = self.embedding.weight if self.output is None else weight_of(self.output)
        return F.linear(x, weight) if head is None else head(x, weight)

    @property
    def plan(self) -> dict[str, str]:
        """How ranks may share the matrices: patterns of module names to tensor-parallel styles.

        The residual stream is sharded over positions between a block's matrices. A model with more
        in it takes another, for example ``plan={**model.plan, "layers.*.extra": "sequence"}``.
        """
        plan = {"embedding": "embedding", "dropout": "sequence", "norm": "sequence"}
        for name in ("attention_norm", "feed_forward_norm", "dropout"):
            plan[f"layers.*.{name}"] = "sequence"
        for name in ("attention.query", "attention.key", "attention.value"):
            plan[f"layers.*.{name}"] = "colwise"
            if self.spec.qk_norm and name != "attention.value":
                plan[f"layers.*.{name}_norm"] = "heads"
        plan["layers.*.attention.output"] = "rowwise"
        if len(self.spec.routed) < self.spec.layers:
            for name in ("gate", "up", "down"):
                style = "rowwise" if name == "down" else "colwise"
                plan[f"layers.*.feed_forward.{name}"] = style
        if self.spec.moe is not None:
            plan |= dict.fromkeys(self.spec.routed.values(), "routed")
            plan["layers.*.feed_forward.experts"] = "expert"
            for name in ("gate", "up", "down") if self.spec.moe.shared else ():
                style = "rowwise" if name == "down" else "colwise"
                plan[f"layers.*.feed_forward.shared.{name}"] = style
        return plan if self.spec.tied else {**plan, "output": "colwise"}

    @property
    def roles(self) -> dict[str, str]:
        """What parameters are for: patterns of their names to roles, the first that fits counts.

        An optimizer of matrices takes those of the role "matrix". A model with more in it takes
        another table, for example ``roles={**model.roles, "layers.*.extra.weight": "matrix"}``.
        """
        roles = {"embedding.weight": "embedding", "output.weight": "head"}
        roles |= {"*norm.weight": "norm", "*.router.weight": "router"}
        for name in ("query", "key", "value", "output"):
            roles[f"layers.*.attention.{name}.weight"] = "matrix"
        for name in ("gate", "up", "down"):
            roles[f"layers.*.feed_forward.{name}.weight"] = "matrix"
            roles[f"layers.*.feed_forward.shared.{name}.weight"] = "matrix"
            roles[f"layers.*.feed_forward.experts.{name}"] = "matrix"
        return roles

    def initial_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None for a norm, filled with ones.

        Projections back into the residual stream are narrower by ``sqrt(2 * layers)``, so that
        the stream's variance does not grow with depth.

        References:
            GPT-2, https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
        """
        if name.endswith("norm.weight"):
            return None
        if name.endswith(INTO_STREAM):
            return INITIAL_STD / math.sqrt(2 * self.spec.layers)
        return INITIAL_STD

    def _routing(
        self,
        given: Routing | None,
        input_ids: Tensor,
        doc_ids: Tensor | None,
        targets: Tensor | None,
        replay: Mapping[str, Tensor] | None,
    ) -> Routing | None:
        """Gather what routers go by in one call; None in a dense model."""
        moe = self.spec.moe
        if moe is None:
            if replay is not None:
                raise ValueError("replay was given to a model without experts (spec.moe is None).")
            return None
        rows, positions = input_ids.shape
        if targets is not None and targets.shape != input_ids.shape:
            raise ValueError(
                f"targets has shape {tuple(targets.shape)} and input_ids {(rows, positions)}; give "
                "one bool for each position."
            )
        is_token = None if doc_ids is None else doc_ids >= 0
        choices = {}
        if replay is not None:
            shape, layers = (rows, positions, moe.top_k), self.spec.routed.values()
            choices = check_choices(replay, layers, shape, moe.experts, is_token)
        if targets is not None:
            targets = targets.bool()
        given = Routing() if given is None else given
        kept = {"choices": choices, "shares": {}}
        return attrs.evolve(given, is_token=is_token, targets=targets, **kept)

    def _rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        spec, scaling = self.spec, self.spec.rope_scaling
        angles = rotary_angles(position_ids, spec.channels, spec.rope_theta, scaling)
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = rotary_turns(angles)
        if scaling is not None:
            cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
        return cos.to(wide), sin.to(wide)


def _block(spec: TransformerSpec, layer: int) -> Block:
    attention = Attention(
        spec.dim,
        spec.heads,
        spec.kv_heads,
        head_dim=spec.head_dim,
        qk_norm=spec.qk_norm,
        norm_eps=spec.norm_eps,
    )
    if spec.moe is not None and layer in spec.routed:
        feed_forward = MoE(spec.dim, spec.moe, spec.routed[layer])
    else:
        feed_forward = FeedForward(spec.dim, spec.ffn_dim)
    return Block(spec.dim, attention, feed_forward, norm_eps=spec.norm_eps, dropout=spec.dropout)
