"""Which part of a tensor on disk is which part of a model's: rules that are put together.

A rule maps patterns of names. ``rename``, ``split`` and ``join`` begin one; ``stack``,
``transpose``, ``cast`` and ``pad`` take a rule and return one. In a pattern ``*`` is a part of a
name without a dot, the same one on both sides, in order. A ``NameMap`` applies rules to all tensors
of a model and checks that each of them is found once, and that no two want the same values on disk.
What comes out are boxes, ranges of each dimension: a rank reads the part of a box that it holds,
and a writer puts the boxes together.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
from torch import Tensor, nn

from forgekit.inputs import brief, check_integers, wrong_type

Box = tuple[tuple[int, int], ...]
"""First and last index, exclusive, of each dimension."""


@attrs.frozen
class Rule:
    """How tensors of a model are found on disk; made by the functions of this file.

    Attributes:
        ours: Patterns of names in the model; several share one tensor on disk.
        theirs: Pattern of the name on disk; None where the tensor is not there.
        more: Patterns of tensors on disk that lie behind ``theirs`` in the model's tensor.
        dim: Dimension of the model's tensors along which several are joined on disk, or here.
        is_stacked: Whether each index of the first dimension is a tensor on disk; its number
            stands for ``{}`` in ``theirs``.
        is_transposed: Whether the last two dimensions are swapped on disk.
        dtype: On disk; the model's if None.
        rows: Rows that are on disk, the first ones; all if None.
    """

    ours: tuple[str, ...]
    theirs: str | None
    more: tuple[str, ...] = ()
    dim: int = 0
    is_stacked: bool = False
    is_transposed: bool = False
    dtype: torch.dtype | None = None
    rows: int | None = None


def rename(ours: str, theirs: str) -> Rule:
    """Find a tensor under another name.

    Examples:
        >>> rule = rename("layers.*.up.weight", "model.layers.*.mlp.up_proj.weight")
    """
    return _checked(Rule((ours,), theirs))


def split(ours: Iterable[str], theirs: str, *, dim: int = 0) -> Rule:
    """Find several tensors side by side in one on disk, such as queries, keys and values.

    Args:
        ours: Their patterns, in the order on disk; all with the same ``*``.
        theirs: Pattern of the name on disk.
        dim: Dimension of the model's tensors along which they are joined.

    Examples:
        >>> rule = split(["layers.*.gate", "layers.*.up"], "h.*.gate_up.weight")
    """
    check_integers(dim=(dim, 0))
    return _checked(Rule(tuple(ours), theirs, dim=dim))


def join(ours: str, theirs: Iterable[str], *, dim: int = 0) -> Rule:
    """Find a tensor as several of one size on disk, which lie side by side in the model.

    Args:
        ours: Its pattern.
        theirs: Patterns of the names on disk, in their order in the model; all with the same ``*``.
        dim: Dimension of the model's tensor along which they are joined.

    Examples:
        >>> rule = join("layers.*.gate_up", ["layers.*.gate.weight", "layers.*.up.weight"])
    """
    check_integers(dim=(dim, 0))
    first, *more = theirs
    return _checked(Rule((ours,), first, tuple(more), dim=dim))


def stack(rule: Rule) -> Rule:
    """Find each index of the first dimension as a tensor; its number is ``{}`` in the name on disk.

    Examples:
        >>> rule = stack(rename("layers.*.experts.up", "layers.*.experts.{}.up_proj.weight"))
    """
    if odd := [name for name in (rule.theirs, *rule.more) if name is None or name.count("{}") != 1]:
        raise ValueError(f"stack: {odd[0]!r} needs {{}} once, where the number stands.")
    if rule.more and not rule.dim:
        raise ValueError("stack takes the first dimension; give join another one, such as dim=1.")
    return attrs.evolve(rule, is_stacked=True)


def transpose(rule: Rule) -> Rule:
    """Find the last two dimensions swapped, as GPT-2 keeps its matrices."""
    return attrs.evolve(rule, is_transposed=not rule.is_transposed)


def cast(rule: Rule, dtype: torch.dtype) -> Rule:
    """Write in this dtype, whatever the model's is; what is read is cast to the model's anyway."""
    if not isinstance(dtype, torch.dtype):
        raise wrong_type("dtype", dtype, "a torch.dtype")
    return attrs.evolve(rule, dtype=dtype)


def pad(rule: Rule, rows: int) -> Rule:
    """Find only the first rows on disk; the others are zero when read, and are not written."""
    check_integers(rows=(rows, 1))
    return attrs.evolve(rule, rows=rows)


def leave_out(ours: str) -> Rule:
    """Say that a tensor is not on disk; reading leaves it as it is."""
    return Rule((ours,), None)


@attrs.frozen
class Part:
    """A box of a model's tensor, and the box of a tensor on disk with the same values.

    Attributes:
        ours: Name in the model.
        ours_box: Where in the model's tensor.
        theirs: Name on disk.
        theirs_box: Where in the tensor on disk.
        axes: For each dimension of the model's tensor the one on disk; None where an index of it
            is a tensor of its own.
    """

    ours: str
    ours_box: Box
    theirs: str
    theirs_box: Box
    axes: tuple[int | None, ...]


class NameMap:
    """Rules, applied to the tensors of a model.

    Args:
        rules: What ``rename`` and the others returned.
        model: The model, whole, on meta perhaps; or its tensors by name.

    Attributes:
        parts: Each tensor's boxes, by name in the model, in its order.
        shapes: Shape of each tensor on disk, by name there, in the order of writing.
        names: Names in the model of what it is made of, by name on disk.
        dtypes: Dtype of those that have their own on disk.
        padded: Rows that are on disk of tensors with more, by name in the model.

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
        self.padded: dict[str, int] = {}
        for name, rule, stars in _matches(tuple(rules), tensors):
            self.parts[name] = list(_parts_of(name, rule, stars, tensors))
            for part in self.parts[name]:
                self._take(part, rule)
            if rule.rows is not None:
                self.padded[name] = rule.rows

    def _take(self, part: Part, rule: Rule) -> None:
        """Note what is on disk, and refuse what other values have been put there already."""
        makers = self.names.setdefault(part.theirs, [])
        known, stops = self.shapes.get(part.theirs), [stop for _, stop in part.theirs_box]
        if known is not None:
            starts = [start for start, _ in part.theirs_box]
            if part.ours in makers or starts[0:] == [0] * len(starts) or len(known) != len(stops):
                raise ValueError(
                    f"{makers[0]!r} and {part.ours!r} are both {part.theirs!r} on disk, in the "
                    "same position; give them names of their own, or split them."
                )
            stops = [max(pair) for pair in zip(known, stops, strict=True)]
        makers.append(part.ours)
        self.shapes[part.theirs] = tuple(stops)
        if rule.dtype is not None:
            self.dtypes[part.theirs] = rule.dtype


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied one under its first name only."""
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named if id(tensor) in kept}


def _checked(rule: Rule) -> Rule:
    if not rule.ours:
        raise ValueError(f"{rule.theirs!r} is no tensor of the model's; name at least one.")
    stars = {pattern: pattern.count("*") for pattern in (*rule.ours, rule.theirs or "", *rule.more)}
    if len(set(stars.values())) > 1:
        raise ValueError(f"patterns of a rule must have the same number of *; they have {stars}.")
    return rule


def _matches(
    rules: tuple[Rule, ...], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Rule, list[str]]]:
    """Each tensor with its rule and what stands for ``*``."""
    patterns = [(rule, _compile(one), one) for rule in rules for one in rule.ours]
    used: set[str] = set()
    for name in tensors:
        found = [(r, m, one) for r, regex, one in patterns if (m := regex.fullmatch(name))]
        if len(found) != 1:
            what = f"match {[one for *_, one in found]}" if found else "match no rule"
            raise ValueError(
                f"{name!r} must match one rule of the name map, and does {what}. Add "
                f"{'a rule, or leave_out(...)' if not found else 'narrower patterns'}."
            )
        used.add(found[0][2])
        yield name, found[0][0], list(found[0][1].groups())
    if unused := [one for *_, one in patterns if one not in used]:
        raise ValueError(f"{unused} match no tensor of the model; it has {brief(list(tensors))}.")


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile("([^.]+)".join(re.escape(part) for part in pattern.split("*")))


def _fill(pattern: str, stars: list[str]) -> str:
    filled = iter(stars)
    return re.sub(r"\*", lambda _: next(filled), pattern)


def _parts_of(
    name: str, rule: Rule, stars: list[str], tensors: Mapping[str, Tensor]
) -> Iterator[Part]:
    """The boxes of one tensor, after what stands before it in the same tensor on disk."""
    if rule.theirs is None:
        return
    group = [_fill(pattern, stars) for pattern in rule.ours]
    if absent := [one for one in group if one not in tensors]:
        raise ValueError(
            f"{name!r} is joined with {absent} on disk, which the model does not have."
        )
    shapes = {tuple(s for d, s in enumerate(tensors[one].shape) if d != rule.dim) for one in group}
    if len(group) > 1 and (len(shapes) > 1 or (rule.is_stacked and not rule.dim)):
        sizes = {one: tuple(tensors[one].shape) for one in group}
        raise ValueError(
            f"{sizes} cannot be joined along dimension {rule.dim}; the others must be equal, and "
            "stack takes the first."
        )
    before = group[: group.index(name)]
    offset = sum(tensors[one].shape[rule.dim] for one in before)
    shape, count = tensors[name].shape, 1 + len(rule.more)
    if rule.more and rule.dim < len(shape) and shape[rule.dim] % count:
        raise ValueError(
            f"{name!r} of shape {tuple(shape)} cannot be {count} tensors of one size on disk along "
            f"dimension {rule.dim}."
        )
    for number, theirs in enumerate((rule.theirs, *rule.more)):
        size = shape[rule.dim] // count if rule.more and rule.dim < len(shape) else 0
        begins = {rule.dim: (number * size, size)} if size else {}
        yield from _boxes(name, tensors[name], rule, _fill(theirs, stars), offset, begins)


def _boxes(
    name: str,
    tensor: Tensor,
    rule: Rule,
    theirs: str,
    offset: int,
    begins: Mapping[int, tuple[int, int]],
) -> Iterator[Part]:
    """One box, or one for each index of the first dimension.

    Args:
        name: Name of a tensor of the model.
        tensor: The tensor.
        rule: How it is found.
        theirs: Name on disk.
        offset: Where it begins on disk along the rule's dimension.
        begins: Where the box begins in the tensor, and its size, by dimension; all of it if empty.
    """
    shape = [begins.get(dim, (0, size))[1] for dim, size in enumerate(tensor.shape)]
    first = 1 if rule.is_stacked else 0
    if len(shape) < first + (2 if rule.is_transposed else 0) or (shape and rule.dim >= len(shape)):
        raise ValueError(f"{name!r} has shape {tuple(shape)}, too few dimensions for its rule.")
    if rule.rows is not None:
        if rule.rows > shape[0]:
            raise ValueError(f"{name!r} has {shape[0]} rows and pad asks for {rule.rows}.")
        shape[0] = rule.rows
    dims = list(range(first, len(shape)))
    if rule.is_transposed:
        dims[-2:] = dims[-1], dims[-2]
    starts = {rule.dim: offset}
    theirs_box = tuple((starts.get(d, 0), starts.get(d, 0) + shape[d]) for d in dims)
    axes = tuple(dims.index(d) if d in dims else None for d in range(len(shape)))
    origin = [begins.get(dim, (0, 0))[0] for dim in range(len(shape))]
    whole = tuple((start, start + size) for start, size in zip(origin, shape, strict=True))
    if not rule.is_stacked:
        yield Part(name, whole, theirs, theirs_box, axes)
        return
    for number in range(shape[0]):
        box = ((number, number + 1), *whole[1:])
        yield Part(name, box, theirs.replace("{}", str(number)), theirs_box, axes)
