"""Groups, masks and means of sampled answers, beside arithmetic in plain Python."""

from __future__ import annotations

import json
import math
import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from rollouts.answers import message

from forgekit.data.batch import mask_batch
from forgekit.evaluation.generate import Generated
from forgekit.rollouts.batch import group_advantages, join_rollouts, rollout_batch
from forgekit.rollouts.losses import dapo_loss, grpo_loss

PROMPTS = [torch.tensor([4, 1]), torch.tensor([4, 2])]
NAMES: dict[str, Any] = {
    "a tensor": torch.tensor([3, 8, 3, 8]),
    "an array": np.array([3, 8, 3, 8], dtype=np.int16),
    "tensors": [torch.tensor(3), torch.tensor(8), torch.tensor(3.0), torch.tensor(8)],
    "numbers of several kinds": [3, np.int64(8), torch.tensor(3), 8.0],
    "texts": ["q", np.str_("p"), np.array("q"), "p"],
    "tuples with tensors": [(torch.tensor(3), "a"), (8, "a"), (3, "a"), (np.int8(8), "a")],
    "what JSON makes of tuples": json.loads(json.dumps([(3, "a"), (8, "a"), (3, "a"), (8, "a")])),
    "prompts": [one.clone() for one in PROMPTS * 2],
}


@pytest.mark.parametrize("kind", NAMES)
def test_answers_are_of_one_group_where_its_names_are_equal(kind):
    groups, rewards = NAMES[kind], torch.tensor([1.0, 5.0, 0.0, 2.0], requires_grad=True)
    found = group_advantages(rewards, groups)
    assert (found.tolist(), found.requires_grad) == ([1.0, 1.0, -1.0, -1.0], False)
    one = message(0, answers=4, rewards=rewards.detach(), groups=groups)
    batch = join_rollouts([one, message(9)])  # whose group 0 is another one
    first = [batch["advantages"][batch["rewards"] == reward].unique() for reward in (5.0, 2.0)]
    assert torch.cat(first).tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (torch.tensor([[0], [0], [1], [1]]), r"groups has shape \(4, 1\); it must be \[n\]"),
        (["a", "a", math.nan, math.nan], r"groups has nan, .* cannot be compared"),
        ([(1, math.nan)] * 4, r"groups has nan, .* cannot be compared"),
        (torch.tensor([0, 0, 1]), "there are 3 groups"),
    ],
)
def test_names_that_cannot_be_compared_are_refused(groups, problem):
    with pytest.raises(ValueError, match=r"answer 2 \(group 'b'\) is nan"):
        group_advantages([1.0, 0.0, math.nan], ["a", "a", "b"])
    with pytest.raises(ValueError, match=problem):
        group_advantages([1.0, 0.0, 1.0, 0.0], groups)
    with pytest.raises(ValueError, match=rf"{problem}|but 3 groups"):
        join_rollouts([message(0, answers=4, groups=groups)])


ANSWERS: dict[str, Any] = {"prompts": [[4, 5], [6]], "ids": [[4, 5, 1, 2, 3], [6, 9]]}
ANSWERS |= {"log_probs": [[-1.0, -2.0, -3.0], [-0.5]], "rewards": [1.0, 0.25]}
"""Of three tokens and of one."""


def of_answers(changes: dict[str, Any]) -> Any:
    given = ANSWERS | changes
    generated = Generated(given.pop("ids"), given.pop("log_probs"))
    return rollout_batch(generated=generated, groups=[0, 0], **given)


def of_message(changes: dict[str, Any]) -> Any:
    """The same through a message, as a generator sends it."""
    return join_rollouts([ANSWERS | changes], pad_to=changes.get("pad_to"))


ONE = [0.5]
FITTING: dict[str, Any] = {
    "a mask of numbers": {"trained": [[1, 0, 1.0], torch.tensor([1])]},
    "numbers of answers": {"versions": torch.tensor([7, 3]), "advantages": [0.5, -2]},
    "a number of numpy for all": {"versions": np.int64(7)},
    "a 0-d tensor for all": {"versions": torch.tensor(7)},
    "anything where nothing is trained": {
        "trained": [[True, False, True], None],
        "versions": [[7, 0.5, 7], 7.0],
        "advantages": [[0.5, math.nan, 0.5], ONE],
    },
}
PER_TOKEN: dict[str, Any] = {
    r"answer 0: trained has shape \(\).* 3 new tokens": {"trained": [True, True]},
    r"answer 0: trained has shape \(1,\)": {"trained": [[True], [True]]},
    r"answer 1: trained has shape \(1, 1\)": {"trained": [None, [[True]]]},
    r"answer 0: trained of token 1 is 0.5": {"trained": [[1, 0.5, 0], None]},
    r"answer 0: log_probs has shape \(1,\)": {"log_probs": [[-1.0], ONE]},
    r"answer 0: log_probs has shape \(\)": {"log_probs": [-1.0, ONE]},
    r"answer 1: log_probs of token 0 is -?inf": {"log_probs": [[-1.0] * 3, [-math.inf]]},
    r"answer 0: versions has shape \(2,\)": {"versions": [[7, 7], 7]},
    r"answer 1: versions of token 0 is 7.5": {"versions": [7, [7.5]]},
    r"answer 0: advantages has shape \(1,\)": {"advantages": [ONE, ONE]},
    r"answer 1: advantages of token 0 is nan": {"advantages": [0.5, math.nan]},
    r"answer 0: advantages of token 2 is 1e\+39; .* float32": {"advantages": [[0, 1, 1e39], 0]},
    r"answer 1: ids are \[6.0, 9.5\]": {"ids": [[4, 5, 1, 2, 3], [6, 9.5]]},
    r"answer 1: ids are \[\[6, 9\]\]": {"ids": [[4, 5, 1, 2, 3], torch.tensor([[6, 9]])]},
    r"capacity 0 must be at least 1": {"pad_to": 0},
}


@pytest.mark.parametrize("problem", PER_TOKEN)
def test_what_is_not_one_number_a_token_is_refused_and_never_broadcast(problem):
    for build in (of_answers, of_message):
        with pytest.raises(ValueError, match=f"^{problem}"):
            build(PER_TOKEN[problem])


@pytest.mark.parametrize("case", FITTING)
def test_numbers_of_tokens_answers_and_batches_that_fit_are_taken(case):
    for batch in (of_answers(FITTING[case]), of_message(FITTING[case])):
        is_first = batch["rewards"] == 1.0
        tokens = 2 if "trained" in FITTING[case] else 3
        wanted = {"lengths": [tokens], "versions": [7], "advantages": [0.5]}
        assert int(is_first.sum()) == tokens
        for name in wanted.keys() & {"lengths", *FITTING[case]}:
            assert batch[name][is_first].unique().tolist() == wanted[name]
        assert float(grpo_loss(batch["log_probs"], batch).count) == pytest.approx(2)


SPLITS = {
    "one": [[0, 1, 2, 3, 4]],
    "ragged": [[4], [1, 2], [], [0, 3]],
    "alone": [[n] for n in range(5)],
}
EDGES: list[dict[str, Any]] = [
    {"ids": [[4, 5, 1, 2]], "prompts": [[4, 5]], "log_probs": [[-1.0, -2.0]]},
    {"ids": [[4, 5]], "prompts": [[4, 5]], "log_probs": [[]]},  # stopped before a first token
    {"ids": [[6]], "prompts": [[6]], "log_probs": [[]]},  # and has no position to predict from
    {"ids": [[6, 7, 8]], "prompts": [[6]], "log_probs": [[-1.0] * 2], "trained": [[False] * 2]},
    {"ids": [[6, 7, 8, 9]], "prompts": [[6]], "log_probs": [[-1.0] * 3], "trained": [[0, 1, 0]]},
]
REWARDS, TRAINED = [1.0, 0.0, 7.0, 0.5, 3.0], [2, 0, 0, 0, 1]


@pytest.mark.parametrize("split", SPLITS)
def test_an_answer_without_a_trained_token_is_an_answer(split):
    """Of whatever packing and split, and shared by ranks that hold slices of rows."""
    messages = [{**edge, "rewards": [r]} for edge, r in zip(EDGES, REWARDS, strict=True)]
    for loss_fn, positions in ((grpo_loss, 99), (dapo_loss, 2)):
        sums: dict[str, list[float]] = {}
        for numbers in SPLITS[split]:
            batch = join_rollouts([messages[n] for n in numbers], pad_to=7)
            for part in (batch, mask_batch(batch)):  # the padding of a rank that has ended
                for first in range(0, 7, positions):
                    piece = part.apply(lambda x, a=first, b=first + positions: x[:, a:b])
                    loss = loss_fn(piece["log_probs"], piece)
                    for name, pair in loss.metrics.items():
                        old = sums.get(name, [0.0, 0.0])
                        sums[name] = [a + float(b) for a, b in zip(old, pair, strict=True)]
        means = {name: total / count for name, (total, count) in sums.items()}
        assert means["rollout/reward"] == pytest.approx(statistics.mean(REWARDS), abs=1e-9)
        assert means["rollout/length"] == pytest.approx(statistics.mean(TRAINED), abs=1e-9)
        assert sums["rollout/ratio"][1] == sum(TRAINED)


def expected(rewards: list[float]) -> list[float]:
    """Differences from the mean over the deviation, from exact fractions."""
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    deviation = Fraction(statistics.pstdev(exact))
    return [float((one - mean) / deviation) for one in exact]


TENTHS = [0.1 + 0.2, 0.3, 0.3]
THIRDS = [sum([0.1] * 10), 1.0, math.fsum([0.1] * 10)]
DIFFERENT: dict[str, Any] = {
    "millionths of the largest": [1e6, 1e6 + 1, 1e6 + 3],
    "what float64 holds": [1.0, 1.0 + 1e-13, 1.0 + 2e-13],
    "beside a large part": [1e12 + 0.25, 1e12, 1e12 + 0.5],
    "negative costs": [-1e9, -1e9 - 1e-4, -1e9 - 2e-4],
    "small": [3e-200, 1e-200, 2e-200],
    "integers of 32 bits": torch.tensor([20_000_000, 20_000_001, 20_000_003], dtype=torch.int32),
    "float32": torch.tensor([1e6, 1e6 + 1, 1e6 + 3]),
    "neighbours in bfloat16": torch.tensor([0.5, 0.50390625, 0.5]).bfloat16(),
}
EQUAL: dict[str, Any] = {
    "a group of one": [7.0],
    "tenths": TENTHS,
    "ten of them": THIRDS,
    "of large numbers": [1e9 * x for x in TENTHS],
    "float32": torch.tensor([0.1]) + torch.tensor([0.2, 0.2, 0.2 + 3e-8]),
    "array of float32": np.cumsum(np.full(10, 0.1, np.float32))[-1:].repeat(2)
    + np.float32([0, 2e-7]),
    "numbers of float32": [torch.tensor(0.1) + torch.tensor(0.2), torch.tensor(0.3)],
    "zeros": [0.0, -0.0, 0.0],
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_rewards_that_their_dtype_tells_apart_have_advantages(case):
    rewards = DIFFERENT[case]
    wanted = expected([float(reward) for reward in rewards])
    others = [0.0, 1e15, -5.0]  # of another group, which change nothing
    if case != "float32" and "16" not in case:
        beside = group_advantages([*rewards, *others], [0] * 3 + [1] * 3)
        assert beside[:3].tolist() == pytest.approx(wanted)
    found = group_advantages(rewards, ["a"] * 3)
    assert found.tolist() == pytest.approx(wanted, rel=1e-9)
    deviation = statistics.pstdev(map(float, rewards))
    apart = group_advantages(rewards, ["a"] * 3, scale=None)
    assert apart.tolist() == pytest.approx([x * deviation for x in wanted], rel=1e-9)
    assert abs(float(found.sum())) < 1e-12


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize("scale", ["std", None])
def test_rewards_that_rounding_tells_apart_are_equal(case, scale):
    rewards = EQUAL[case]
    found = group_advantages(rewards, [5] * len(rewards), scale=scale)
    assert found.tolist() == [0.0] * len(rewards)
