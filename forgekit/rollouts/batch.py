"""Sampled answers with rewards, packed into rows that a step trains on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from forgekit.checks import brief, check_choice, is_integer
from forgekit.data.batch import FILL, IGNORED, TEACHER
from forgekit.data.documents import check_document
from forgekit.data.packing import pack

ULPS = 8
"""Rewards of a group count as equal within so many units in the last place of the largest."""


def group_advantages(
    rewards: Tensor | Sequence[float], groups: Sequence[Hashable], *, scale: str | None = "std"
) -> Tensor:
    """Compute advantages: each reward minus the mean of its group.

    Args:
        rewards: ``[n]``, on any device.
        groups: ``[n]``, the group of each by its name, in any order: numbers, texts, tensors, or
            tuples of these. Names that are equal are one, whichever of them they are.
        scale: ``"std"`` divides by the group's standard deviation (of a population), as GRPO does;
            None leaves differences as they are, as Dr. GRPO does.

    Returns:
        ``[n]`` float64 on the host. Those of a group add up to 0. They are 0 in a group of one and
        where all rewards are equal but for rounding, within 8 units in the last place of the
        largest: there is nothing to prefer. Tensors and arrays of float32 and below count in units
        of float32, all other rewards in those of float64.

    Raises:
        ValueError: If a reward is not finite, there are other numbers of rewards and groups, a name
            cannot be compared, as NaN, or ``scale`` is neither.

    Examples:
        >>> group_advantages([1.0, 0.0, 0.25, 0.5], ["a", "a", "b", "b"]).tolist()
        [1.0, -1.0, -1.0, 1.0]
    """
    check_choice("scale", scale or "std", ["std"])
    names, values = _names(groups), _on_host(rewards, torch.float64)
    if values.shape != (len(names),):
        raise ValueError(
            f"rewards has shape {tuple(values.shape)}, but there are {len(names)} groups; each "
            "answer needs one reward and one group."
        )
    if not values.isfinite().all():
        bad = int((~values.isfinite()).nonzero()[0])
        raise ValueError(
            f"the reward of answer {bad} (group {names[bad]!r}) is {values[bad]:g}; so would be "
            "the mean of its group. Give failed answers a finite reward, or leave out their group."
        )
    numbers: dict[Hashable, int] = {}
    at = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names]).long()

    def of_groups(reduce: str, of: Tensor) -> Tensor:
        each = torch.zeros(len(numbers), dtype=torch.float64)
        return each.scatter_reduce(0, at, of, reduce, include_self=False)[at]

    smallest = of_groups("amin", values)
    centred = values - smallest  # first: a mean of large values would round small differences off
    spread, centred = of_groups("amax", centred), centred - of_groups("mean", centred)
    share = centred / spread  # squares neither underflow nor overflow
    dtype = getattr(rewards, "dtype", None) or getattr(next(iter(rewards), None), "dtype", None)
    is_coarse = dtype is not None and "float" in str(dtype) and dtype.itemsize < 8
    rounding = ULPS * torch.finfo(torch.float32 if is_coarse else torch.float64).eps
    is_equal = spread <= rounding * of_groups("amax", values.abs())
    scaled = share / of_groups("mean", share.square()).sqrt() if scale == "std" else centred
    return torch.where(is_equal, 0.0, scaled)


def rollout_batch(
    prompts: Sequence[Any],
    generated: Any,
    rewards: Tensor | Sequence[float],
    groups: Sequence[Hashable],
    *,
    versions: Any = None,
    trained: Sequence[Any] | None = None,
    advantages: Sequence[Any] | Tensor | None = None,
    teacher: Sequence[Any] | None = None,
    teacher_k: int = 0,
    scale: str | None = "std",
    pad_to: int | None = None,
    rows: int | None = None,
) -> TensorDict:
    """Pack prompts and their sampled answers into rows.

    Ids are trained as they were sampled; no text is tokenized again. The prompt, and what
    ``trained`` leaves out, such as the output of a tool, is read and not trained on.

    Args:
        prompts: The ids of each prompt, ``n`` of any lengths.
        generated: ``Generated(ids, log_probs)`` as ``generate(..., log_probs=True)`` returns it for
            a list of prompts: whole texts that begin with their prompts, and the log-probability of
            each new token.
        rewards: ``[n]``.
        groups: ``[n]`` names of groups, such as the number of the prompt, as for
            ``group_advantages``.
        versions: Of the weights that sampled: one number, one for each answer, or ``[new]`` numbers
            of its tokens for each; 0 if left out.
        trained: For each answer ``[new]`` bool (or 0 and 1) or, for all its tokens, None; all if
            left out.
        advantages: ``[n]``, or ``[new]`` for each answer, finite where a token is trained; by
            default those of ``group_advantages``.
        teacher: For each answer a mapping of ``teacher_ids`` and ``teacher_log_probs``,
            ``[new k]``: a teacher's tokens in place of each new one, and their natural logarithms.
        teacher_k: The k of a teacher's rows, which padding has too; 0 without a teacher.
        scale: As for ``group_advantages``.
        pad_to: Positions of a row; that of the longest text if left out.
        rows: Rows, those of padding included; by default those that the texts fill. A pipeline
            needs the same number in each micro-batch.

    Returns:
        TensorDict of ``[b s]``: ``input_ids``, ``labels`` (shifted, -100 where nothing is trained),
        ``log_probs``, ``advantages`` and ``rewards`` (of a token's text) float32, ``versions``
        int64, ``lengths`` int64 (trained tokens of a token's text), ``empty`` bool (the first
        position of each text without a trained token, whose reward stands there), ``doc_ids`` (-1
        on padding) and ``position_ids``; with ``teacher_k`` also ``teacher_ids`` int32 (-100 where
        nothing is trained) and ``teacher_log_probs``, ``[b s k]``. A text of one token has one
        position. Of no texts, one row of padding.

    Raises:
        ValueError: If a text does not begin with its prompt, what is given for an answer is not one
            number for each of its new tokens (or, where that is allowed, one for all), a number is
            not finite or not what it must be, a teacher's row has another k, an id twice or
            probabilities that sum above 1, a text is longer than a row, or all of them than the
            rows.

    Examples:
        >>> from forgekit.evaluation.generate import Generated
        >>> answers = Generated([[5, 7, 8], [5, 9]], [[-0.5, -0.25], [-1.0]])
        >>> batch = rollout_batch([[5], [5]], answers, rewards=[1.0, 0.0], groups=[0, 0])
        >>> batch["labels"].tolist(), batch["advantages"].tolist()
        ([[7, 8], [9, -100]], [[1.0, 1.0], [-1.0, 0.0]])
    """
    if advantages is None:
        advantages = group_advantages(rewards, groups, scale=scale)
    if versions is None or is_integer(versions):
        versions = [int(versions or 0)] * len(prompts)
    trained, teacher = ([None] * len(prompts) if c is None else c for c in (trained, teacher))
    columns_of = prompts, generated.ids, generated.log_probs, advantages, rewards, versions, trained
    answers = enumerate(zip(*columns_of, teacher, strict=True))
    texts = [_text(number, teacher_k, *answer) for number, answer in answers]
    sizes = [len(text["input_ids"]) for text in texts]
    if not sizes:
        return _padding(rows or 1, pad_to or 1, teacher_k)
    width = max(sizes) if pad_to is None else pad_to
    bins = pack(sizes, width, long="error")
    columns: dict[str, list[Tensor]] = {}
    for start, end in zip(bins.offsets[:-1], bins.offsets[1:], strict=True):
        pieces = [texts[document] for document in bins.documents[start:end]]
        for number, piece in enumerate(pieces):
            piece["doc_ids"] = torch.full_like(piece["input_ids"], number)
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        room = width - len(joined["input_ids"])
        for name, values in joined.items():
            row = F.pad(values, (*(0, 0) * (values.ndim - 1), 0, room), value=FILL.get(name, 0))
            columns.setdefault(name, []).append(row)
    count = len(bins.offsets) - 1
    batch = TensorDict({name: torch.stack(column) for name, column in columns.items()}, [count])
    if rows is None or count == rows:
        return batch
    if count > rows:
        raise ValueError(
            f"{len(texts)} texts fill {count} rows of {width} positions, but there are {rows}; "
            "use more rows, longer ones, or fewer answers at a time."
        )
    return torch.cat([batch, _padding(rows - count, width, teacher_k)])  # pyright: ignore[reportReturnType, reportArgumentType]


def join_rollouts(
    messages: Sequence[Mapping[str, Any]],
    *,
    teacher_k: int = 0,
    pad_to: int | None = None,
    rows: int | None = None,
    scale: str | None = "std",
) -> TensorDict:
    """Build a micro-batch from generators' messages; the default ``to_batch`` of a stream.

    Args:
        messages: Of each one or more answers, with ``prompts``, ``ids`` (whole texts),
            ``log_probs`` and ``rewards`` as for ``rollout_batch``, and where they are there
            ``versions`` (a number for all, or as there), ``groups``, ``trained``, ``advantages``
            and ``teacher``. Groups are those of a message: by default its answers are one.
        teacher_k: As for ``rollout_batch``.
        pad_to: As for ``rollout_batch``.
        rows: As for ``rollout_batch``.
        scale: As for ``rollout_batch``.

    Returns:
        What ``rollout_batch`` returns.

    Raises:
        KeyError: If a message lacks a required key.
        ValueError: As ``rollout_batch``.
    """
    columns: dict[str, Any] = {name: [] for name in ("prompts", "ids", *_OF_ANSWERS)}
    for number, message in enumerate(messages):
        if not (count := len(message["prompts"])):
            raise ValueError(f"message {number} has no answer; leave out groups without one.")
        blank = dict.fromkeys(("groups", "trained", "teacher"), [None] * count)
        whole = {"versions": 0, **blank, **message}
        if is_integer(whole["versions"]):
            whole["versions"] = [whole["versions"]] * count
        if "advantages" not in message:
            whole["advantages"] = group_advantages(whole["rewards"], whole["groups"], scale=scale)
        for name, column in columns.items():
            if len(whole[name]) != count:
                raise ValueError(f"there are {count} prompts, but {len(whole[name])} {name}.")
            column.extend(whole[name] if name != "groups" else [(number, g) for g in whole[name]])
    generated = _Answers(columns.pop("ids"), columns.pop("log_probs"))
    sizes = {"teacher_k": teacher_k, "pad_to": pad_to, "rows": rows}
    return rollout_batch(generated=generated, **sizes, **columns)


class _Answers(NamedTuple):
    ids: list[Any]
    log_probs: list[Any]


_RULES = MappingProxyType(
    {torch.bool: "True or False", torch.int64: "an integer", torch.float32: "a finite float32"}
)
_OF_ANSWERS = ("log_probs", "rewards", "groups", "versions", "trained", "advantages", "teacher")


def _padding(rows: int, width: int, k: int) -> TensorDict:
    teacher = dict.fromkeys(TEACHER, np.zeros((0, k), np.int64)) if k else None
    text = _text(0, k, [0], [0], [], [], 0.0, [], None, teacher)
    text["doc_ids"] = text["input_ids"]
    sizes = {n: (rows, width, *v.shape[1:]) for n, v in text.items()}
    columns = {n: v.new_full(sizes[n], FILL.get(n, 0)) for n, v in text.items()}
    return TensorDict(columns, [rows])


def _on_host(values: Any, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(values, dtype=dtype, device="cpu").detach()


def _names(groups: Any) -> list[Hashable]:
    """Names of groups as keys that are equal where the names are; a tensor's is its identity."""
    if len(shape := getattr(groups, "shape", (0,))) != 1:
        raise ValueError(f"groups has shape {tuple(shape)}; it must be [n], one per answer.")
    return [_name(group) for group in groups]


def _name(name: Any) -> Hashable:
    name = name.tolist() if hasattr(name, "tolist") else name
    if isinstance(name, list | tuple):
        return tuple(map(_name, name))
    if name != name:  # each NaN would be a group of its own
        raise ValueError(
            f"groups has {brief(name)}, which cannot be compared with other names. Name a group "
            "by a number, a text, a tensor, or a tuple of these."
        )
    return name


def _text(
    number: int,
    k: int,
    prompt: Any,
    ids: Any,
    log_probs: Any,
    advantages: Any,
    reward: Any,
    versions: Any,
    trained: Any,
    teacher: Any,
) -> dict[str, Tensor]:
    """Return the columns of one text; positions are tokens minus one, at least one."""
    prompt, ids = torch.as_tensor(prompt).cpu(), torch.as_tensor(ids).cpu()
    if ids.ndim != 1 or not ((ids.long() == ids) & (ids >= 0)).all():
        problem = f"answer {number}: ids are {brief(ids.tolist())}"
        raise ValueError(f"{problem}; they must be [n] integers from 0, as they were sampled.")
    new = len(ids) - len(prompt)
    if not len(prompt) or new < 0 or not torch.equal(ids[: len(prompt)], prompt):
        raise ValueError(
            f"answer {number} has {len(ids)} ids that do not begin with its prompt of "
            f"{len(prompt)}; pass whole texts with the ids that were sampled, never encoded again."
        )
    first, size = len(prompt) - 1, max(len(ids) - 1, 1)  # it predicts the first new token
    is_new = is_trained = torch.ones(new, dtype=torch.bool)
    if trained is not None:
        is_trained = _of_tokens(f"answer {number}: trained", trained, torch.bool, is_new)

    def at_new(values: Tensor, fill: int = 0) -> Tensor:
        whole = torch.full((size, *values.shape[1:]), fill, dtype=values.dtype)
        whole[first : first + new][is_trained] = values[is_trained]
        return whole

    def taken(name: str, values: Any, dtype: torch.dtype, at: Tensor, *, one: bool) -> Tensor:
        return at_new(_of_tokens(f"answer {number}: {name}", values, dtype, at, one=one))

    taught = {}
    if k or teacher is not None:
        document = {"input_ids": ids[len(prompt) :], **(teacher or {})}
        stored = check_document(f"answer {number}", document, k=k)
        taught = {n: at_new(torch.from_numpy(stored[n].copy()), FILL.get(n, 0)) for n in TEACHER}
    lengths, is_empty = is_trained.sum(), torch.zeros(size, dtype=torch.bool)
    rewards = at_new(torch.tensor(float(reward)).expand(new))
    if not lengths:
        is_empty[0], rewards[0] = True, float(reward)
    return {
        "input_ids": ids[:size].long(),
        "labels": at_new(ids[len(prompt) :].long(), IGNORED),
        "log_probs": taken("log_probs", log_probs, torch.float32, is_new, one=False),
        "advantages": taken("advantages", advantages, torch.float32, is_trained, one=True),
        "rewards": rewards,
        "versions": taken("versions", versions, torch.int64, is_trained, one=True),
        "lengths": at_new(lengths.expand(new)),
        "empty": is_empty,
        "position_ids": torch.arange(size),
        **taught,
    }


def _of_tokens(
    name: str, values: Any, dtype: torch.dtype, at: Tensor, *, one: bool = False
) -> Tensor:
    """Numbers of new tokens, ``[new]``, or of ``one`` for all, right at least where ``at`` is."""
    given, taken = _on_host(values, torch.float64), _on_host(values, dtype)
    if given.shape != at.shape and not (one and given.ndim == 0):
        raise ValueError(
            f"{name} has shape {tuple(given.shape)} for {len(at)} new tokens; it must be "
            f"[{len(at)}]{' or one number' if one else ''}."
        )
    given, taken = given.expand(at.shape), taken.expand(at.shape)
    is_right = taken.isfinite() if dtype.is_floating_point else taken.double() == given
    if (wrong := (at & ~is_right).nonzero()).numel():
        token = int(wrong[0])
        raise ValueError(
            f"{name} of token {token} is {given[token]:g}; it must be {_RULES[dtype]}."
        )
    return taken
