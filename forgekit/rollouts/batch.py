"""Sampled answers with rewards, packed into rows that a step trains on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from forgekit.checks import check_choice
from forgekit.data.batch import IGNORED
from forgekit.data.packing import pack

EQUAL = 1e-6
"""Rewards of a group that differ by less than this, as a share of the largest, are equal."""


def group_advantages(
    rewards: Tensor | Sequence[float], groups: Sequence[Hashable], *, scale: str | None = "std"
) -> Tensor:
    """How much better each answer is than the mean of its group.

    Args:
        rewards: ``[n]``.
        groups: The group of each, by any name: a group's answers may stand anywhere.
        scale: ``"std"`` divides by the group's standard deviation (of a population), as GRPO does;
            None leaves differences as they are, as Dr. GRPO does.

    Returns:
        ``[n]`` float64. Those of a group add up to 0. They are 0 in a group of one and where all
        rewards are equal but for rounding: there is nothing to prefer.

    Raises:
        ValueError: If a reward is not finite, there are other numbers of rewards and groups, or
            ``scale`` is neither.

    Examples:
        >>> group_advantages([1.0, 0.0, 0.25, 0.5], ["a", "a", "b", "b"]).tolist()
        [1.0, -1.0, -1.0, 1.0]
    """
    check_choice("scale", scale or "std", ["std"])
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if values.shape != (len(groups),):
        raise ValueError(
            f"rewards has shape {tuple(values.shape)} and there are {len(groups)} groups; each "
            "answer needs one of both."
        )
    if not values.isfinite().all():
        bad = int((~values.isfinite()).nonzero()[0])
        raise ValueError(
            f"the reward of answer {bad} (group {groups[bad]!r}) is {values[bad]:g}; the mean of "
            "its group would be too. Give failed answers a finite reward, or leave out their group."
        )
    numbers: dict[Hashable, int] = {}
    at = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups]).long()
    sizes = torch.bincount(at).double()

    def means(of: Tensor) -> Tensor:
        return (torch.zeros_like(sizes).index_add_(0, at, of) / sizes)[at]

    apart = values - means(values)
    deviation = means(apart.square()).sqrt()
    largest = torch.zeros_like(sizes).scatter_reduce(0, at, values.abs(), "amax")[at]
    is_equal = deviation <= EQUAL * largest
    return torch.where(is_equal, 0.0, apart / deviation if scale == "std" else apart)


def rollout_batch(
    prompts: Sequence[Any],
    generated: Any,
    rewards: Tensor | Sequence[float],
    groups: Sequence[Hashable],
    *,
    versions: Any = None,
    trained: Sequence[Any] | None = None,
    advantages: Sequence[Any] | Tensor | None = None,
    scale: str | None = "std",
    pad_to: int | None = None,
    rows: int | None = None,
) -> TensorDict:
    """Pack prompts and what was sampled after them into rows.

    Ids are trained as they were sampled; no text is tokenized again. The prompt, and what
    ``trained`` leaves out, such as the output of a tool, is read and not trained on.

    Args:
        prompts: The ids of each prompt, ``n`` of any lengths.
        generated: ``Generated(ids, log_probs)`` as ``generate(..., log_probs=True)`` returns it for
            a list of prompts: whole texts that begin with their prompts, and the log-probability of
            each new token.
        rewards: ``[n]``.
        groups: ``[n]`` names of groups, such as the number of the prompt.
        versions: Of the weights that sampled: one number, one for each answer, or ``[new]`` numbers
            of its tokens for each; 0 if left out.
        trained: For each answer ``[new]`` bool or, for all its tokens, None; all if left out.
        advantages: ``[n]``, or ``[new]`` for each answer; by default those of ``group_advantages``.
        scale: As for ``group_advantages``.
        pad_to: Positions of a row; that of the longest text if left out.
        rows: Rows, those of padding included; as many as the texts fill if left out. A pipeline
            needs as many in each micro-batch.

    Returns:
        TensorDict of ``[b s]``: ``input_ids``, ``labels`` (shifted, -100 where nothing is trained),
        ``log_probs``, ``advantages`` and ``rewards`` (of a token's text) float32, ``versions``
        int64, ``lengths`` int64 (trained tokens of a token's text), ``doc_ids`` (-1 on padding) and
        ``position_ids``. Where no text has two tokens, one row of padding.

    Raises:
        ValueError: If a text does not begin with its prompt, numbers do not fit, a log-probability
            is not finite, a text is longer than a row, or all of them than the rows.

    Examples:
        >>> from forgekit.evaluation.generate import Generated
        >>> answers = Generated([[5, 7, 8], [5, 9]], [[-0.5, -0.25], [-1.0]])
        >>> batch = rollout_batch([[5], [5]], answers, rewards=[1.0, 0.0], groups=[0, 0])
        >>> batch["labels"].tolist(), batch["advantages"].tolist()
        ([[7, 8], [9, -100]], [[1.0, 1.0], [-1.0, 0.0]])
    """
    if advantages is None:
        advantages = group_advantages(rewards, groups, scale=scale)
    if versions is None or isinstance(versions, int):
        versions = [versions or 0] * len(prompts)
    trained = [None] * len(prompts) if trained is None else trained
    columns_of = prompts, generated.ids, generated.log_probs, advantages, rewards, versions, trained
    answers = enumerate(zip(*columns_of, strict=True))
    texts = [_text(number, *answer) for number, answer in answers]
    sizes = [len(text["input_ids"]) for text in texts]
    if not any(sizes):
        return _padding(rows or 1, pad_to or 1)
    width = pad_to or max(sizes)
    bins = pack(sizes, width, long="error")
    columns: dict[str, list[Tensor]] = {}
    for start, end in zip(bins.offsets[:-1], bins.offsets[1:], strict=True):
        pieces = [texts[document] for document in bins.documents[start:end]]
        for number, piece in enumerate(pieces):
            piece["doc_ids"] = torch.full_like(piece["input_ids"], number)
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        room = width - len(joined["input_ids"])
        for name, values in joined.items():
            row = F.pad(values, (0, room), value=FILLED.get(name, 0))
            columns.setdefault(name, []).append(row)
    count = len(bins.offsets) - 1
    batch = TensorDict({name: torch.stack(column) for name, column in columns.items()}, [count])
    if rows is None or count == rows:
        return batch
    if count > rows:
        raise ValueError(
            f"{len(texts)} texts fill {count} rows of {width} positions, and there are {rows}; "
            "take more rows, longer ones, or fewer answers at a time."
        )
    return torch.cat([batch, _padding(rows - count, width)])  # pyright: ignore[reportReturnType, reportArgumentType]


def join_rollouts(
    messages: Sequence[Mapping[str, Any]],
    *,
    pad_to: int | None = None,
    rows: int | None = None,
    scale: str | None = "std",
) -> TensorDict:
    """Build a micro-batch from messages of generators; a stream's ``to_batch`` by default.

    Args:
        messages: Of each one or more answers, with ``prompts``, ``ids`` (whole texts),
            ``log_probs`` and ``rewards`` as for ``rollout_batch``, and where they are there
            ``versions`` (a number for all, or as there), ``groups``, ``trained`` and
            ``advantages``. Groups are those of a message: by default its answers are one.
        pad_to: As for ``rollout_batch``.
        rows: As for ``rollout_batch``.
        scale: As for ``rollout_batch``.

    Returns:
        What ``rollout_batch`` returns.

    Raises:
        KeyError: If a message lacks what it must have.
        ValueError: As ``rollout_batch``.
    """
    columns: dict[str, Any] = {name: [] for name in ("prompts", "ids", *_OF_ANSWERS)}
    for number, message in enumerate(messages):
        if not (count := len(message["prompts"])):
            raise ValueError(f"message {number} holds no answer; leave out groups without one.")
        whole = {"groups": [0] * count, "versions": 0, "trained": [None] * count, **message}
        if isinstance(whole["versions"], int):
            whole["versions"] = [whole["versions"]] * count
        if "advantages" not in message:
            whole["advantages"] = group_advantages(whole["rewards"], whole["groups"], scale=scale)
        for name, column in columns.items():
            if len(whole[name]) != count:
                raise ValueError(f"{count} prompts came with {len(whole[name])} {name}.")
            column.extend(whole[name] if name != "groups" else [(number, g) for g in whole[name]])
    generated = _Answers(columns.pop("ids"), columns.pop("log_probs"))
    return rollout_batch(generated=generated, pad_to=pad_to, rows=rows, **columns)


class _Answers(NamedTuple):
    ids: list[Any]
    log_probs: list[Any]


_OF_ANSWERS = ("log_probs", "rewards", "groups", "versions", "trained", "advantages")
FILLED = MappingProxyType({"labels": IGNORED, "doc_ids": -1})
"""What stands on padding, where it is not 0."""


def _padding(rows: int, width: int) -> TensorDict:
    text = _text(0, [0], [0], [], [], 0.0, [], None)
    text["doc_ids"] = text["input_ids"]
    row = {n: F.pad(v, (0, width), value=FILLED.get(n, 0))[None] for n, v in text.items()}
    return TensorDict({name: values.repeat(rows, 1) for name, values in row.items()}, [rows])


def _text(
    number: int,
    prompt: Any,
    ids: Any,
    log_probs: Any,
    advantages: Any,
    reward: Any,
    versions: Any,
    trained: Any,
) -> dict[str, Tensor]:
    """The columns of one text, one position less than it has tokens."""
    prompt, ids = torch.as_tensor(prompt).cpu(), torch.as_tensor(ids).cpu()
    new = len(ids) - len(prompt)
    if not len(prompt) or new < 0 or not torch.equal(ids[: len(prompt)], prompt):
        raise ValueError(
            f"answer {number} has {len(ids)} ids that do not begin with its prompt of "
            f"{len(prompt)}; pass whole texts with the ids that were sampled, never encoded again."
        )
    log_probs = torch.as_tensor(log_probs, dtype=torch.float32)
    if len(log_probs) != new or not log_probs.isfinite().all():
        raise ValueError(
            f"answer {number} has {new} new tokens and {int(log_probs.isfinite().sum())} finite "
            f"log-probabilities of {len(log_probs)}; each sampled token needs one."
        )
    is_trained = torch.ones(new, dtype=torch.bool)
    if trained is not None:
        is_trained = torch.as_tensor(trained, dtype=torch.bool)
    labels = ids[1:].long()
    first = len(prompt) - 1  # the position that predicts the first new token

    def at_new(values: Any, dtype: torch.dtype, fill: int = 0) -> Tensor:
        whole = torch.full((len(labels),), fill, dtype=dtype)
        whole[first:] = torch.where(
            is_trained, torch.as_tensor(values, dtype=dtype, device="cpu"), fill
        )
        return whole

    return {
        "input_ids": ids[:-1].long(),
        "labels": at_new(labels[first:], torch.int64, IGNORED),
        "log_probs": at_new(log_probs, torch.float32),
        "advantages": at_new(advantages, torch.float32),
        "rewards": at_new(float(reward), torch.float32),
        "versions": at_new(versions, torch.int64),
        "lengths": at_new(is_trained.sum(), torch.int64),
        "position_ids": torch.arange(len(labels)),
    }
