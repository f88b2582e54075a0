"""A decoder-only transformer, independent of ranks.

Attention and position ids are sockets, plain callables which ``parallelize`` replaces; the output
projection can be replaced for one call (``head``), so that a loss may read the gathered output
weight inside ``forward`` and never build all logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from attrs import field
from attrs.validators import ge, gt, lt, optional
from torch import Tensor, nn

from forgekit.checks import divisors, nearest_multiples
from forgekit.model.batch_invariant import (
    attend_by_tile,
    check_parts,
    linear_by_tile,
    refuse_batch_invariant,
    restarting_positions,
    rows_by_tile,
    silu_in_parts,
    telling,
)
from forgekit.model.initial import init_weights
from forgekit.model.layers import Attention, Block, FeedForward, rotary_angles, rotary_turns
from forgekit.model.lora import weight_of
from forgekit.model.moe import MoE
from forgekit.model.moe_spec import MoESpec
from forgekit.model.rope_scaling import RopeScaling
from forgekit.model.routing import Routing
from forgekit.model.vocabulary import logits_of, on_tokens
from forgekit.tensors import wide

INITIAL_STD = 0.02

INTO_STREAM = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "feed_forward.shared.down.weight",
    "feed_forward.experts.down",
)
"""Suffixes of the projections back into the residual stream."""


def _check_heads(spec: TransformerSpec, _field: Any, kv_heads: int) -> None:
    if spec.heads % kv_heads:
        raise ValueError(
            f"kv_heads {kv_heads} must divide heads {spec.heads}; it can be one of "
            f"{divisors(spec.heads)}."
        )


def _check_channels(spec: TransformerSpec, _field: Any, head_dim: int | None) -> None:
    size, step = spec.dim, 2 * spec.heads
    rule = f"dim {size} must be divisible by 2 * heads = {step}"
    if head_dim is not None:
        size, step = head_dim, 2
        rule = f"head_dim {size} must be even"
    if size % step:
        raise ValueError(
            f"{rule}, so that rotary embedding can pair the channels of a head; "
            f"{nearest_multiples(size, step)}."
        )


def _check_moe(spec: TransformerSpec, _field: Any, moe: MoESpec | None) -> None:
    if moe is not None and moe.first >= spec.layers:
        raise ValueError(
            f"moe.first is {moe.first}, but layers {spec.layers}: no block would have experts. "
            f"Blocks are counted from 0 to {spec.layers - 1}."
        )


def _check_rows(spec: TransformerSpec, _field: Any, tokens: int | None) -> None:
    if tokens is not None and tokens > spec.vocab_size:
        raise ValueError(
            f"unpadded_vocab_size {tokens} is above vocab_size {spec.vocab_size}, but each token "
            "needs a row. Raise vocab_size."
        )


@attrs.frozen(kw_only=True)
class TransformerSpec:
    """Sizes of a ``Transformer``.

    Attributes:
        vocab_size: Rows of the embedding and of the output projection, ``v``.
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
        unpadded_vocab_size: Rows that are tokens, the first ones; all if None. The others are
            padding: they take part in no softmax.
        qkv_bias: Whether queries, keys and values have a bias.
    """

    vocab_size: int = field(validator=ge(1))
    dim: int = field(validator=ge(1))
    layers: int = field(validator=ge(1))
    heads: int = field(validator=ge(1))
    kv_heads: int = field(validator=(ge(1), _check_heads))
    ffn_dim: int = field(validator=ge(1))
    max_seq_len: int = field(validator=ge(1))
    dropout: float = field(default=0.0, validator=(ge(0), lt(1)))
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = field(default=10_000.0, validator=(gt(0), lt(math.inf)))
    norm_eps: float = field(default=1e-5, validator=(ge(0), lt(math.inf)))
    moe: MoESpec | None = field(default=None, validator=_check_moe)
    head_dim: int | None = field(default=None, validator=(optional(ge(1)), _check_channels))
    rope_scaling: RopeScaling | None = None
    unpadded_vocab_size: int | None = field(default=None, validator=(optional(ge(1)), _check_rows))
    qkv_bias: bool = False

    @property
    def tokens(self) -> int:
        """Number of token ids, without rows of padding."""
        return self.unpadded_vocab_size or self.vocab_size

    @property
    def channels(self) -> int:
        """Channels per head, ``c``."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def routed(self) -> dict[int, str]:
        """Names of the layers with experts, by block."""
        if self.moe is None:
            return {}
        blocks = filter(self.moe.is_routed, range(self.layers))
        return {block: f"layers.{block}.feed_forward" for block in blocks}


def locate_all(positions: int, device: torch.device) -> Tensor:
    """Return position ids of whole sequences: ``0 .. positions - 1``, ``[s]`` int64."""
    return torch.arange(positions, device=device)


class Transformer(nn.Module):
    """Token ids to logits: RMSNorm, rotary grouped-query attention, SwiGLU.

    Args:
        spec: Sizes.
        seed: Seed of the initial weights. On the meta device nothing is filled; ``parallelize``
            does it, to bitwise the same values.
        batch_invariant: Whether a token's logits have the same bits whatever is computed beside
            it, so that ``generate`` and a training forward agree; also for ``parallelize``.

    Raises:
        ValueError: If ``batch_invariant`` cannot hold: with experts or dropout.

    Examples:
        >>> spec = TransformerSpec(vocab_size=8, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32,
        ...                        max_seq_len=4)
        >>> Transformer(spec)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self, spec: TransformerSpec, seed: int = 0, *, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.dropout = nn.Dropout(spec.dropout)
        self.layers = nn.ModuleList(_block(spec, layer) for layer in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.output = None if spec.tied else nn.Linear(spec.dim, spec.vocab_size, bias=False)
        self.locate: Callable[[int, torch.device], Tensor] = locate_all
        self.batch_invariant = False
        if batch_invariant:
            make_batch_invariant(self)
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
        routing: Routing | None = None,
    ) -> Any:
        """Compute logits, or whatever ``head`` makes of the last hidden states.

        Args:
            input_ids: ``[b s]`` int.
            position_ids: ``[b s]`` or ``[s]`` int rotary positions; ``locate`` gives them if None.
            doc_ids: ``[b s]`` int document of each position, -1 on padding. Attention stays inside
                a document. Rotary positions are relative, so they need not restart.
            head: ``head(hidden, weight)`` in place of the output projection, with ``hidden``
                ``[b s d]`` and ``weight`` ``[v d]``, for example a chunked loss. A model that is
                ``batch_invariant`` passes that on to a head that takes an argument of this name.
                Rows of padding are cut off before. Where ranks share the vocabulary they are
                gathered for that, unless the head takes ``vocab_size``, the number of tokens.
            targets: ``[b s]`` bool, where the routers' auxiliary losses are summed; on every
                position that is not padding if None. Without effect on a dense model.
            routing: What ``accumulate`` gives each call: the loss scale, and where to note counts.

        Returns:
            ``[b s v]`` logits of all tokens, or what ``head`` returned.

        Raises:
            ValueError: If the sequence is longer than ``max_seq_len``, or ``targets`` has another
                shape.
        """
        positions = input_ids.shape[1]
        if positions > self.spec.max_seq_len:
            raise ValueError(
                f"input_ids has {positions} positions; max_seq_len is {self.spec.max_seq_len}. "
                "Shorten the sequences or build the model with a larger max_seq_len."
            )
        if position_ids is None and self.batch_invariant and doc_ids is not None:
            position_ids = restarting_positions(doc_ids)
        if position_ids is None:
            position_ids = self.locate(positions, input_ids.device)
        x = self.dropout(self.embedding(input_ids))
        cos, sin = self._rotary(position_ids, x.dtype)
        routing = self._routing(routing, input_ids, doc_ids, targets)
        routed = self.spec.routed
        for block, layer in enumerate(self.layers):
            x = layer(x, cos, sin, doc_ids, *((routing,) if block in routed else ()))
        x = rows_by_tile(self.norm, x) if self.batch_invariant else self.norm(x)
        weight = self.embedding.weight if self.output is None else weight_of(self.output)
        if head is None:
            head = linear_by_tile if self.batch_invariant else logits_of
        elif self.batch_invariant:
            head = telling(head)
        if self.spec.tokens < self.spec.vocab_size:
            head = on_tokens(head, self.spec.tokens)
        return head(x, weight)

    @property
    def plan(self) -> dict[str, str]:
        """Tensor-parallel plan: patterns of module names to styles.

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
        swiglu = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
        if len(self.spec.routed) < self.spec.layers:
            plan |= {f"layers.*.feed_forward.{name}": style for name, style in swiglu.items()}
        if self.spec.moe is not None:
            plan |= dict.fromkeys(self.spec.routed.values(), "routed")
            plan["layers.*.feed_forward.experts"] = "expert"
        if self.spec.moe is not None and self.spec.moe.shared:
            plan |= {f"layers.*.feed_forward.shared.{name}": s for name, s in swiglu.items()}
        return plan if self.spec.tied else {**plan, "output": "colwise"}

    @property
    def roles(self) -> dict[str, str]:
        """Roles of parameters by patterns of names; the first match counts.

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
        """Return the standard deviation of a parameter's initial values; None for norms (ones).

        Projections back into the residual stream are narrower by ``sqrt(2 * layers)``, so that
        the stream's variance does not grow with depth. A bias begins at zero.

        References:
            GPT-2, https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
        """
        if name.endswith("norm.weight"):
            return None
        if name.endswith(".bias"):
            return 0.0
        if name.endswith(INTO_STREAM):
            return INITIAL_STD / math.sqrt(2 * self.spec.layers)
        return INITIAL_STD

    def _routing(
        self,
        routing: Routing | None,
        input_ids: Tensor,
        doc_ids: Tensor | None,
        targets: Tensor | None,
    ) -> Routing | None:
        """Collect the routers' inputs of one call; None in a dense model."""
        if self.spec.moe is None:
            return None
        if targets is not None and targets.shape != input_ids.shape:
            raise ValueError(
                f"targets has shape {tuple(targets.shape)}, input_ids {tuple(input_ids.shape)}; "
                "pass one bool for each position."
            )
        masks = {
            "is_token": None if doc_ids is None else doc_ids >= 0,
            "targets": None if targets is None else targets.bool(),
        }
        return attrs.evolve(routing or Routing(), **masks, choices={}, shares={})

    def _rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        spec, scaling = self.spec, self.spec.rope_scaling
        angles = rotary_angles(position_ids, spec.channels, spec.rope_theta, scaling)
        magnitude = 1.0 if scaling is None else scaling.magnitude
        cos, sin = ((turns * magnitude).to(wide(dtype)) for turns in rotary_turns(angles))
        return cos, sin


def make_batch_invariant(model: Any) -> None:
    """Make a model batch-invariant by products of fixed shapes, in place; see ``Transformer``.

    Raises:
        ValueError: If it has experts, packed weights or dropout, or is no ``Transformer`` that
            computes with its own blocks.
    """
    if not attentions(model):
        kind = type(model).__name__
        refuse_batch_invariant(f"{kind} does not compute as a Transformer, or its blocks do not")
    check_parts(model)
    for block in model.layers:
        block.rows = block.attention.rows = rows_by_tile
        block.attention.attend = attend_by_tile
        block.feed_forward.activation = silu_in_parts
    model.batch_invariant = True


def attentions(model: nn.Module) -> dict[str, Attention]:
    """Return the attentions of a model, by name, if it mixes positions nowhere else.

    Returns:
        Empty unless the model is a ``Transformer`` of its own blocks: what another one computes
        of a position may depend on others in a way that neither a cache nor tiles hold.
    """
    if not isinstance(model, Transformer) or type(model).forward is not Transformer.forward:
        return {}
    by_name = {}
    for index, block in enumerate(model.layers):
        attention = getattr(block, "attention", None)
        if type(block).forward is not Block.forward or not isinstance(attention, Attention):
            return {}
        if type(attention).forward is not Attention.forward:
            return {}
        by_name[f"layers.{index}.attention"] = attention
    return by_name


def _block(spec: TransformerSpec, layer: int) -> Block:
    attention = Attention(
        spec.dim,
        spec.heads,
        spec.kv_heads,
        head_dim=spec.head_dim,
        qk_norm=spec.qk_norm,
        qkv_bias=spec.qkv_bias,
        norm_eps=spec.norm_eps,
    )
    if spec.moe is not None and layer in spec.routed:
        feed_forward = MoE(spec.dim, spec.moe, spec.routed[layer])
    else:
        feed_forward = FeedForward(spec.dim, spec.ffn_dim)
    return Block(spec.dim, attention, feed_forward, norm_eps=spec.norm_eps, dropout=spec.dropout)
