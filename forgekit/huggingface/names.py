"""Rules that map parts of tensors on disk to parts of a model's tensors.

A rule maps patterns of names. ``rename``, ``split`` and ``join`` begin one; ``stack``,
``transpose``, ``cast`` and ``pad`` take a rule and return one. In a pattern ``*`` is a part of a
name without a dot, the same one on both sides, in order. A ``NameMap`` applies rules to all tensors
of a model and checks that each of them is found once, and that no two want the same values on disk.
What comes out are boxes, ranges of each dimension: a rank reads the part of a box that it holds,
and a writer puts the boxes together.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
import torch
from torch import Tensor, nn

from forgekit.checks import brief
from forgekit.tensors import Box, named_tensors, volume

T = TypeVar("T")


@attrs.frozen
class Rule:
    """How a model's tensors are stored on disk; made by the functions of this file.

    Attributes:
        names: Patterns of names in the model; several share one tensor on disk.
        keys: Patterns of keys on disk, in their order in the model's tensor; none where it is not
            stored.
        dim: Dimension of the model's tensors along which several are joined on disk, or here.
        is_stacked: Whether each index of the first dimension is a tensor on disk; its number
            stands for ``{}`` in the key.
        is_transposed: Whether the last two dimensions are swapped on disk.
        dtype: On disk; the model's if None.
        rows: Rows that are on disk, the first ones; all if None.
        tokens: Rows up to which others are new tokens: when read, the mean of those on disk.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    dim: int = 0
    is_stacked: bool = False
    is_transposed: bool = False
    dtype: torch.dtype | None = None
    rows: int | None = None
    tokens: int = 0


def rename(name: str, key: str) -> Rule:
    """Store a tensor under another key.

    Examples:
        >>> rule = rename("layers.*.up.weight", "model.layers.*.mlp.up_proj.weight")
    """
    return _checked(Rule((name,), (key,)))


def split(names: Iterable[str], key: str, *, dim: int = 0) -> Rule:
    """Split one tensor on disk into several of the model, such as queries, keys and values.

    Args:
        names: Their patterns, in the order on disk; all with the same ``*``.
        key: Pattern of the key on disk.
        dim: Dimension of the model's tensors along which they are joined.

    Examples:
        >>> rule = split(["layers.*.gate", "layers.*.up"], "h.*.gate_up.weight")
    """
    return _checked(Rule(tuple(names), (key,), dim))


def join(name: str, keys: Iterable[str], *, dim: int = 0) -> Rule:
    """Join several tensors of one size on disk into one of the model.

    Args:
        name: Its pattern.
        keys: Patterns of the keys on disk, in their order in the model; all with the same ``*``.
        dim: Dimension of the model's tensor along which they are joined.

    Examples:
        >>> rule = join("layers.*.gate_up", ["layers.*.gate.weight", "layers.*.up.weight"])
    """
    return _checked(Rule((name,), tuple(keys), dim))


def stack(rule: Rule) -> Rule:
    """Stack tensors on disk along the first dimension; ``{}`` in their name is the index.

    Examples:
        >>> rule = stack(rename("layers.*.experts.up", "layers.*.experts.{}.up_proj.weight"))
    """
    if len(rule.keys) > 1 and not rule.dim:
        raise ValueError("stack takes the first dimension; give join another one, such as dim=1.")
    return attrs.evolve(rule, is_stacked=True)


def transpose(rule: Rule) -> Rule:
    """Swap the last two dimensions on disk, as GPT-2 stores its matrices."""
    return attrs.evolve(rule, is_transposed=not rule.is_transposed)


def cast(rule: Rule, dtype: torch.dtype) -> Rule:
    """Write in this dtype, whatever the model's is; reading casts to the model's dtype."""
    return attrs.evolve(rule, dtype=dtype)


def pad(rule: Rule, rows: int, *, tokens: int = 0) -> Rule:
    """Store only the first rows on disk.

    When read, rows below ``tokens`` become the mean of those on disk, and the others zero.
    """
    return attrs.evolve(rule, rows=rows, tokens=tokens)


def leave_out(name: str) -> Rule:
    """Leave a tensor out of files; reading keeps its value."""
    return Rule((name,), ())


@attrs.frozen
class Part:
    """A box of a model's tensor and the box on disk with the same values.

    Attributes:
        name: Name in the model.
        box: Where in the model's tensor.
        key: Key on disk.
        key_box: Where in the tensor on disk.
        is_stacked: Whether the first dimension of the model's, one index of it, is not on disk.
        is_transposed: Whether the last two dimensions are swapped on disk.
    """

    name: str
    box: Box
    key: str
    key_box: Box
    is_stacked: bool = False
    is_transposed: bool = False

    def to_key(self, sizes: Sequence[T]) -> tuple[T, ...]:
        """Reorder values per dimension of the model's tensor to the order on disk."""
        kept = tuple(sizes[1:] if self.is_stacked else sizes)
        return (*kept[:-2], kept[-1], kept[-2]) if self.is_transposed else kept


class NameMap:
    """Rules applied to a model's tensors.

    Args:
        rules: What ``rename`` and the others returned.
        model: The model, whole, on meta perhaps; or its tensors by name.

    Attributes:
        parts: Each tensor's boxes, by name in the model, in its order.
        shapes: Shape of each tensor on disk, by name there, in the order of writing.
        names: Names of the model's tensors behind each name on disk.
        dtypes: Dtype of those that have their own on disk.
        padded: Rows that are on disk, and rows that are tokens, of tensors with more, by name in
            the model.

    Raises:
        ValueError: If a tensor is found by no rule or by two, a rule finds none, two tensors want
            the same name on disk, or shapes do not fit a rule.
    """

    def __init__(self, rules: Iterable[Rule], model: nn.Module | Mapping[str, Tensor]) -> None:
        tensors = named_tensors(model) if isinstance(model, nn.Module) else dict(model)
        self.parts: dict[str, list[Part]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.names: dict[str, list[str]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.padded: dict[str, tuple[int, int]] = {}
        filled = Counter[str]()
        for name, rule, stars in _matches(tuple(rules), tensors):
            group = [_fill(pattern, stars) for pattern in rule.names]
            self.parts[name] = list(_parts_of(name, rule, stars, group, tensors))
            for part in self.parts[name]:
                stops = tuple(stop for _, stop in part.key_box)
                names = self.names.setdefault(part.key, [])
                if names and (name in names or names[0] not in group):
                    raise ValueError(f"{names[0]!r} and {name!r} are both {part.key!r} on disk.")
                names.append(name)
                self.shapes[part.key] = tuple(map(max, self.shapes.get(part.key, stops), stops))
                filled[part.key] += volume(part.key_box)
                if rule.dtype is not None:
                    self.dtypes[part.key] = rule.dtype
            if rule.rows is not None:
                self.padded[name] = rule.rows, rule.tokens
        for key, shape in self.shapes.items():
            if filled[key] != math.prod(shape):
                sizes = {name: tuple(tensors[name].shape) for name in self.names[key]}
                raise ValueError(
                    f"{sizes} do not fill {key!r} of shape {shape} on disk: only their sizes along "
                    "the dimension that joins them may differ."
                )


def _checked(rule: Rule) -> Rule:
    stars = {pattern: pattern.count("*") for pattern in (*rule.names, *rule.keys)}
    if len(set(stars.values())) > 1:
        raise ValueError(f"patterns of a rule must have the same number of *; they have {stars}.")
    return rule


def _matches(
    rules: tuple[Rule, ...], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Rule, list[str]]]:
    """Yield each tensor with its rule and the match of ``*``."""
    patterns = [(rule, _compile(one), one) for rule in rules for one in rule.names]
    used: set[str] = set()
    for name in tensors:
        matching = [(r, m, one) for r, regex, one in patterns if (m := regex.fullmatch(name))]
        if len(matching) != 1:
            raise ValueError(
                f"{name!r} must match one rule of the name map, or leave_out(...); it matches "
                f"{[one for *_, one in matching]}."
            )
        ((rule, match, pattern),) = matching
        used.add(pattern)
        yield name, rule, list(match.groups())
    if unused := [one for *_, one in patterns if one not in used]:
        raise ValueError(f"no tensor of the model matches {unused}; it has {brief(list(tensors))}.")


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile("([^.]+)".join(re.escape(part) for part in pattern.split("*")))


def _fill(pattern: str, stars: list[str]) -> str:
    for star in stars:
        pattern = pattern.replace("*", star, 1)
    return pattern


def _parts_of(
    name: str, rule: Rule, stars: list[str], group: list[str], tensors: Mapping[str, Tensor]
) -> Iterator[Part]:
    """Yield the parts of one tensor, by key and by index of a stack.

    Args:
        name: The tensor's.
        rule: Its rule.
        stars: What each ``*`` stands for.
        group: Names of the tensors that share its key, itself among them.
        tensors: The model's.
    """
    if not rule.keys:
        return
    dim, shape = rule.dim, list(tensors[name].shape)
    if rule.rows is not None:
        if rule.rows > shape[0]:
            raise ValueError(f"{name!r} has {shape[0]} rows, but pad asks for {rule.rows}.")
        shape[0] = rule.rows
    if len(rule.keys) > 1 and shape[dim] % len(rule.keys):
        raise ValueError(
            f"{name!r} of shape {tuple(shape)} cannot be split into {len(rule.keys)} tensors "
            f"of equal size along dimension {dim}."
        )
    offset = sum(tensors[one].shape[dim] for one in group[: group.index(name)])
    for number, pattern in enumerate(rule.keys):
        key, box = _fill(pattern, stars), [(0, size) for size in shape]
        key_box = list(box)
        if shape:  # a scalar has no dimension to join along
            size = shape[dim] // len(rule.keys)
            box[dim] = number * size, (number + 1) * size
            key_box[dim] = offset, offset + size
        part = Part(name, tuple(box), key, (), rule.is_stacked, rule.is_transposed)
        part = attrs.evolve(part, key_box=part.to_key(key_box))
        if not rule.is_stacked:
            yield part
            continue
        for index in range(shape[0]):
            one = (index, index + 1), *box[1:]
            yield attrs.evolve(part, box=one, key=key.replace("{}", str(index)))
