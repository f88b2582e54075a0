"""What lm-eval asks of a model, beside log-likelihoods that are computed token after token."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from tokenizers.processors import TemplateProcessing

import forgekit as fk
from forgekit.data import train_tokenizer
from forgekit.run.lm_eval_harness import HarnessModel

ROOT = Path(__file__).parents[2]
TEXT = "to be or not to be, that is the question: whether tis nobler in the mind to suffer"
EOS = 0
SPEC = fk.TransformerSpec(
    vocab_size=280, dim=16, layers=2, heads=2, kv_heads=2, ffn_dim=24, max_seq_len=8
)


def make_tokenizer(*, bos=False):
    tokenizer = train_tokenizer([TEXT] * 2, vocab_size=280)
    if bos:
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.encode_special_tokens = False
        special = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=special)
    return tokenizer


def make_model(**changes):
    spec = {field: getattr(SPEC, field) for field in SPEC.__slots__ if not field.startswith("_")}
    model = fk.Transformer(fk.TransformerSpec(**(spec | {"vocab_size": 281} | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that tokens differ in what is likely after them
    return model.double()


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


@torch.no_grad()
def by_hand(model, context, target):
    """One call of the model for each token, with as much context as there is room for."""
    model.eval()
    total, is_greedy, ids = 0.0, True, [*context, *target]
    for at in range(len(context), len(ids)):
        window = ids[max(0, len(ids) - 1 - model.spec.max_seq_len) : at]
        logits = model(torch.tensor([window]))[0, -1]
        total += logits.log_softmax(-1)[ids[at]].item()
        is_greedy &= logits.argmax().item() == ids[at]
    return total, is_greedy


@torch.no_grad()
def likely_next(model, tokenizer, word):
    """A word and its most likely next token, if the tokenizer keeps them apart; else None."""
    ids = tokenizer.encode(word).ids
    ids.append(model.eval()(torch.tensor([ids]))[0, -1].argmax().item())
    text = tokenizer.decode(ids[-1:])
    return (word, text) if tokenizer.encode(word + text).ids == ids else None


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_log_likelihoods_are_those_of_each_token_in_turn_and_in_the_order_of_the_requests(
    batch_size,
):
    model, tokenizer = make_model(), make_tokenizer()
    most_likely = next(filter(None, (likely_next(model, tokenizer, w) for w in TEXT.split())))
    asked = requests(
        ("to be", " or"),
        ("", "to be"),
        ("to be or ", "not"),  # the space is part of the next token
        (TEXT, " the question"),  # longer than the model takes
        ("x", "yz"),
        ("  ", "to"),
        most_likely,
    )
    spelled = [
        ("to be", " or"),
        (None, "to be"),
        ("to be or", " not"),
        (TEXT, " the question"),
        ("x", "yz"),
        (None, "  to"),
        most_likely,
    ]
    lm = HarnessModel(model, tokenizer, eos_id=EOS, batch_size=batch_size)
    found = lm.loglikelihood(asked)
    for (context, target), (likely, is_greedy) in zip(spelled, found, strict=True):
        whole = tokenizer.encode((context or "") + target).ids
        first = [EOS] if context is None else tokenizer.encode(context).ids
        rest = whole if context is None else whole[len(first) :]
        expected = by_hand(model, first, rest)
        assert likely == pytest.approx(expected[0], rel=1e-12)
        assert is_greedy is expected[1]
    assert [is_greedy for _, is_greedy in found].count(True) >= 1
    assert len({round(likely, 6) for likely, _ in found}) == len(found)


def test_a_text_is_scored_once_from_its_first_token_on_however_long_it_is():
    """Windows of the model's length; the last one reaches back as far as there is room."""
    model, tokenizer = make_model(), make_tokenizer()
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > 2 * 8
    row, expected, end = [EOS, *ids], 0.0, 0
    while end < len(ids):
        start, end = end, min(end + 8, len(ids))
        window = torch.tensor([row[max(0, end - 8) : end]])
        scores = model.eval()(window)[0].log_softmax(-1)
        expected += sum(scores[t - end][row[t + 1]].item() for t in range(start, end))
    lm = HarnessModel(model, tokenizer, eos_id=EOS, batch_size=2)
    found = lm.loglikelihood_rolling(requests(("to",), (TEXT,), ("",)))
    first = by_hand(model, [EOS], tokenizer.encode("to").ids)[0]
    assert found == [pytest.approx(first), pytest.approx(expected), 0]
    assert math.isfinite(expected)


@torch.no_grad()
def greedy_text(model, tokenizer, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(model.eval()(torch.tensor([ids[-8:]]))[0, -1].argmax().item())
    return tokenizer.decode(ids[-count:])


def test_text_goes_on_greedily_up_to_a_stop_text_for_each_request_in_its_order():
    model, tokenizer = make_model(), make_tokenizer()
    model.embedding.weight.data[EOS] = 0.0
    prompts = ["to be or", "the question: whether", "x", "to"]
    whole = [greedy_text(model, tokenizer, tokenizer.encode(p).ids[-4:], 4) for p in prompts]
    assert all(len(text) > 1 for text in whole)
    stops = [[], [whole[1][1:]], ["never there", whole[2][-1]], []]
    lm = HarnessModel(model, tokenizer, eos_id=EOS, batch_size=2, max_new_tokens=4)
    options = [{"until": stop, "do_sample": False} for stop in stops]
    options[3] = {"until": [], "max_gen_toks": 2, "temperature": 0.0}
    found = lm.generate_until(requests(*zip(prompts, options, strict=True)))
    expected = [
        whole[0],
        whole[1][: whole[1].index(whole[1][1:])],
        whole[2][: whole[2].index(whole[2][-1])],
        greedy_text(model, tokenizer, tokenizer.encode(prompts[3]).ids, 2),
    ]
    assert found == expected


class Given(torch.nn.Module):
    """Notes the ids that it is given."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.spec = SimpleNamespace(max_seq_len=64, vocab_size=281)
        self.given = []

    def forward(self, ids):
        self.given.append(ids[0].tolist())
        return self.scale * torch.zeros(*ids.shape, 281)


@pytest.mark.parametrize(
    ("ask", "args", "expected"),
    [
        ("loglikelihood", ("to", " be"), ["<s>", "to", " be"]),
        ("loglikelihood", ("<s>to", " be"), ["<s>", "to", " be"]),
        ("loglikelihood", ("", "to be"), ["<s>", "to be"]),
        ("loglikelihood", ("", "<s>to be"), ["<s>", "to be"]),
        ("loglikelihood", (" ", "to be"), ["<s>", " to be"]),
        ("loglikelihood_rolling", ("to be",), ["<s>", "to be"]),
        ("loglikelihood_rolling", ("<s>to be",), ["<s>", "to be"]),
        ("generate_until", ("to be", {"until": []}), ["<s>", "to be"]),
        ("generate_until", ("<s>to be", {"until": []}), ["<s>", "to be"]),
        ("generate_until", ("", {"until": []}), ["<s>"]),
    ],
)
def test_what_a_tokenizer_adds_by_itself_is_never_there_twice(ask, args, expected):
    tokenizer, model = make_tokenizer(bos=True), Given()
    bos = tokenizer.token_to_id("<s>")
    lm = HarnessModel(model, tokenizer, prefix_id=bos, max_new_tokens=1)
    getattr(lm, ask)(requests(args))
    parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in expected]
    ids = [id for part in parts for id in part]
    assert ids.count(bos) == 1
    assert model.given[0] == (ids if ask == "generate_until" else ids[:-1])


def test_special_tokens_are_added_where_it_is_asked_for_and_nowhere_else():
    tokenizer, model = make_tokenizer(bos=True), Given()
    lm = HarnessModel(model, tokenizer, add_special_tokens=False, max_new_tokens=1)
    lm.generate_until(requests(("to be", {})))
    assert model.given == [tokenizer.encode("to be", add_special_tokens=False).ids]


REFUSED = {
    "no end": (
        {"tokenizer": SimpleNamespace()},
        r"^the tokenizer has no eos_token_id and no token '<\|endoftext\|>'; pass eos_id",
    ),
    "too long": ({"max_length": 9}, r"^max_length 9 is above max_seq_len 8 of the model\.$"),
    "length": ({"max_length": 0}, r"^max_length 0 must be at least 1\.$"),
    "batch": ({"batch_size": 0}, r"^batch_size 0 must be at least 1\.$"),
    "new": ({"max_new_tokens": 0}, r"^max_new_tokens 0 must be at least 1\.$"),
    "unknown length": (
        {"model": torch.nn.Linear(1, 1)},
        r"^the model does not say how many positions it takes \(spec\.max_seq_len\); pass",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_asked_is_refused(case):
    options, message = REFUSED[case]
    given = {"model": make_model(), "tokenizer": make_tokenizer(), **options}
    with pytest.raises(ValueError, match=message):
        HarnessModel(given.pop("model"), given.pop("tokenizer"), **given)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("ask", "args", "message"),
    [
        ("loglikelihood", ("to", TEXT), r"^a continuation has \d+ tokens and the model takes 8 at"),
        (
            "generate_until",
            ("to", {}),
            r"^256 new tokens leave no room for a prompt in the 8 posit",
        ),
        (
            "generate_until",
            ("to", {"max_gen_toks": 2, "num_beams": 4}),
            r"^a task asks for \{'num_beams': 4\}, which forgekit\.generate does not do\. It does",
        ),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(ask, args, message):
    lm = HarnessModel(make_model(), make_tokenizer())
    with pytest.raises(ValueError, match=message):
        getattr(lm, ask)(requests(args))


def _answers(rank, world, sizes):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    with torch.device("meta"):
        model = fk.Transformer(SPEC)
    model = fk.parallelize(model, mesh)
    return _ask(HarnessModel(model, make_tokenizer(), batch_size=3))


def _ask(lm):
    asked = requests(("to be", " or"), ("x", "yz"), ("", "to be or not"), ("to be or", " not"))
    likely = [value for value, _ in lm.loglikelihood(asked)]
    return [*likely, *lm.loglikelihood_rolling(requests((TEXT,), ("to",)))], lm.generate_until(
        requests(("to be", {"max_gen_toks": 3}), ("x", {"max_gen_toks": 3}))
    )


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}])
def test_every_rank_of_a_layout_gives_the_answers_of_one_process(sizes):
    likely, texts = _ask(HarnessModel(fk.Transformer(SPEC), make_tokenizer(), batch_size=3))
    for found in run_ranks(_answers, 2, sizes):
        assert found[0] == pytest.approx(likely, rel=2e-5)
        assert found[1] == texts


@pytest.mark.bad_input
def test_without_lm_eval_the_extra_is_named():
    with pytest.raises(ImportError, match=r'Install it with: pip install "forgekit\[eval\]"'):
        fk.run.lm_eval_model(make_model(), make_tokenizer())


@pytest.mark.oracle
def test_tasks_of_lm_eval_give_what_its_own_model_of_transformers_gives(tmp_path):
    """Choices, perplexity of texts and generation, on local tasks; `make oracle` installs it."""
    python = ROOT / ".venv" / "lm-eval" / "bin" / "python"
    script = Path(__file__).parent / "lm_eval_tasks.py"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [str(python), str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "equal"
