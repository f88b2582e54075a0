"""Sampling against a plain loop, hand-made chains and the frequencies of a known distribution."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch
from covering import first_of
from lab import SPEC
from pool import run_again
from torch import nn

import forgekit as fk

PROMPT = torch.tensor([[1, 2, 3], [7, 5, 9]])


def sharp(model):
    """Make the next token differ from row to row: fresh weights are nearly indifferent."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(12)
            elif name.endswith(".bias"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)))
    return model


def transformer(**changes):
    return sharp(fk.Transformer(attrs.evolve(SPEC, **changes)))


def greedy(model, ids, count):
    for _ in range(count):
        output = model(ids[:, -SPEC.max_seq_len :])
        logits = getattr(output, "logits", output)[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


class Chain(nn.Module):
    """The next token is the last one plus one, modulo 10; the logits do not leave a doubt."""

    def forward(self, ids):
        return 100.0 * nn.functional.one_hot((ids + 1) % 10, 10)


class Given(nn.Module):
    """The same logits everywhere; one may stand for no token."""

    def __init__(self, *logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, ids):
        return self.logits.expand(*ids.shape, -1)


def fixed(*probabilities):
    return Given(*torch.tensor(probabilities).log().tolist())


RAGGED = [torch.tensor([1, 2, 3]), torch.tensor([7]), torch.tensor([4, 4, 0, 9, 2])]
MOE = fk.MoESpec(experts=4, top_k=2, ffn_dim=24, shared=1)


class Mixing(fk.Transformer):
    """Each position also sees the sum of those before it, which no cache of keys holds."""

    def forward(self, input_ids, **options):
        return super().forward(input_ids, **options).cumsum(1)


class Beside(nn.Sequential):
    """A block that mixes positions by itself."""

    def forward(self, x, *args):
        return self[0](x, *args) + 0.5 * x.cumsum(1)


def mixing_block(spec):
    model = fk.Transformer(spec)
    model.layers[1] = Beside(model.layers[1])
    return model


class Answering(fk.Transformer):
    """Logits in an object, as models of transformers give them."""

    def forward(self, input_ids, **options):
        return SimpleNamespace(logits=super().forward(input_ids, **options))


MODELS = {
    "beyond max_seq_len": (16, fk.Transformer, {}),
    "tied": (6, fk.Transformer, {"kv_heads": 6, "tied": True, "qkv_bias": True}),
    "experts": (6, fk.Transformer, {"moe": MOE, "qk_norm": False}),
    "a model that mixes positions": (6, Mixing, {}),
    "a block that does": (6, mixing_block, {}),
    "logits in an object": (6, Answering, {}),
}


@pytest.fixture
def memory_of_nan():
    """Memory that nobody has filled holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(("count", "kind", "changes"), MODELS.values(), ids=MODELS)
def test_prompts_of_any_lengths_go_on_as_each_alone(count, kind, changes):
    """Also where only some rows are longer than max_seq_len."""
    model = sharp(kind(attrs.evolve(SPEC, **changes))).double()
    prompts = [*RAGGED, torch.arange(30)] if count == 16 else RAGGED
    found = fk.generate(model, prompts, max_new_tokens=count, temperature=0)
    for row, prompt in zip(found, prompts, strict=True):
        assert torch.equal(row, greedy(model, prompt[None], count)[0])
    assert len(set(found[0].tolist())) > 3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probs_are_those_of_the_whole_softmax(temperature):
    model = transformer().double()
    options = {"temperature": temperature, "log_probs": True, "seed": 3}
    found = fk.generate(model, RAGGED, max_new_tokens=7, **options)
    for ids, likely, prompt in zip(*found, RAGGED, strict=True):
        logits = model(ids[None, :-1])[0, len(prompt) - 1 :].float() / (temperature or 1.0)
        wanted = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        assert likely.shape == (7,)
        torch.testing.assert_close(likely, wanted, rtol=1e-5, atol=1e-5)
        assert likely.min() < -0.1 or temperature == 0


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8}], ids=str)
def test_a_text_depends_on_seed_and_sample_number_alone(options):
    """Whatever the companions, their order and number, the padding and the room for tokens."""
    model, options = transformer(dropout=0.3).double(), {"temperature": 1.5, **options}
    prompts, random_state = [RAGGED[number % 3] for number in range(7)], torch.get_rng_state()
    texts = fk.generate(model, prompts, max_new_tokens=9, seed=5, **options)
    assert len({tuple(t[len(p) :].tolist()) for t, p in zip(texts, prompts, strict=True)}) == 7
    for count, chosen in ((9, [6, 2, 0]), (9, [4]), (3, [1, 5, 3, 0, 2, 6, 4])):
        rows = [prompts[number] for number in chosen]
        again = fk.generate(model, rows, max_new_tokens=count, seed=5, samples=chosen, **options)
        for row, number in zip(again, chosen, strict=True):
            assert torch.equal(row, texts[number][: len(prompts[number]) + count])
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    other = fk.generate(model, prompts, max_new_tokens=9, seed=6, **options)
    assert not any(map(torch.equal, other, texts))


def test_a_new_token_costs_one_position():
    model, seen = transformer(), []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    fk.generate(model, RAGGED, max_new_tokens=5)
    assert seen == [(3, 5), (3, 1), (3, 1), (3, 1), (3, 1)]
    assert model.layers[0].attention.attend is transformer().layers[0].attention.attend


def test_rows_end_with_a_sequence_that_they_have_produced():
    options = {"max_new_tokens": 9, "temperature": 0, "stop": [[6, 7], [3]]}
    found = fk.generate(Chain(), [[2], [5, 6], [1, 9]], **options)
    through_3 = [5, 6, 7, 8, 9, 0, 1, 2, 3]  # the 6 was in the prompt
    assert [row.tolist() for row in found] == [[2, 3], through_3, [1, 9, 0, 1, 2, 3]]
    square = fk.generate(Chain(), torch.tensor([[2], [5]]), **options, log_probs=True)
    assert square.ids.tolist() == [[2, 3, 3], [5, 6, 7]]
    assert square.log_probs[0, 1] == 0
    ended = fk.generate(Chain(), torch.tensor([[2], [5]]), eos_id=8, **options)
    assert ended.tolist() == [[2, 3, 8], [5, 6, 7]]
    options = {"max_new_tokens": 4, "temperature": 0, "eos_id": 5}
    found = fk.generate(Chain(), [[4], [1, 2], [8]], **options, log_probs=True)
    assert [row.tolist() for row in found.ids] == [[4, 5], [1, 2, 3, 4, 5], [8, 9, 0, 1, 2]]
    assert [len(row) for row in found.log_probs] == [1, 3, 4]


DRAWN = [
    ({}, [0.5, 0.3, 0.2]),
    ({"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
    ({"temperature": 2.0, "top_k": 2}, [0.5**0.5, 0.3**0.5, 0.0]),
    ({"top_k": 99}, [0.5, 0.3, 0.2]),
    # A nucleus is the fewest tokens with that share.
    ({"top_p": 0.5}, [0.5, 0.0, 0.0]),
    *(({"top_p": p}, [0.5, 0.3, 0.0]) for p in (0.51, 0.8)),
]


@pytest.mark.parametrize(("options", "expected"), DRAWN)
def test_tokens_are_drawn_as_often_as_they_are_likely(options, expected):
    rows, model = 3_000, fixed(0.5, 0.3, 0.2)
    drawn = fk.generate(model, torch.zeros(rows, 1).long(), max_new_tokens=1, **options)[:, 1]
    shares = (torch.bincount(drawn, minlength=3) / rows).tolist()
    assert shares == pytest.approx([wanted / sum(expected) for wanted in expected], abs=0.02)
    assert [share == 0 for share in shares] == [wanted == 0 for wanted in expected]


TIES = [
    ({"top_k": 1}, [1, 0, 0, 0]),
    ({"top_k": 2}, [1, 1, 0, 0]),
    ({"top_k": 3, "temperature": 3.0}, [1, 1, 1, 0]),
    ({"top_p": 1e-9}, [1, 0, 0, 0]),
    ({"top_p": 0.6}, [1, 1, 0, 0]),
    ({"temperature": 0.0}, [1, 0, 0, 0]),
]


@pytest.mark.parametrize(("options", "expected"), TIES)
def test_of_equally_likely_tokens_the_first_are_kept(options, expected):
    model = fixed(0.01, 0.33, 0.33, 0.33)
    drawn = fk.generate(model, torch.zeros(60, 1).long(), max_new_tokens=1, **options)[:, 1]
    counts = torch.bincount(drawn, minlength=4)[1:]
    assert (counts > 0).int().tolist() == expected[:3]
    assert len(drawn.unique()) == sum(expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e30])
@pytest.mark.parametrize("temperature", [1e-9, 1e-29, 1e-31, 1e-38, 1e-45, 5e-324])
def test_the_limit_of_a_small_temperature_is_the_most_likely_token(temperature, scale):
    model = Given(-3.0 * scale, 7.0 * scale, float("-inf"), 7.5 * scale, -80.0 * scale)
    prompts, options = torch.zeros(9, 1).long(), {"max_new_tokens": 2, "temperature": temperature}
    for more in ({}, {"top_k": 4}, {"top_p": 0.9}):
        assert (fk.generate(model, prompts, **options, **more)[:, 1:] == 3).all()
    if scale == 1.0:
        ids, likely = fk.generate(model, prompts, **options, log_probs=True)
        rate = temperature if temperature >= 1e-30 else 1.0
        wanted = (model.logits.double() / rate).log_softmax(-1)[3].float()
        assert (ids[:, 1:] == 3).all()
        torch.testing.assert_close(likely, wanted.expand(9, 2))


@pytest.mark.parametrize("kind", [fk.Transformer, Mixing], ids=["caches", "none"])
@pytest.mark.parametrize(("prompt", "count", "says"), [(17, 1, 1), (10, 8, 1), (9, 8, 0)])
def test_rows_beyond_max_seq_len_are_named_once_and_have_no_log_probs(
    caplog, kind, prompt, count, says
):
    """Text goes on with the last positions; what a policy trains on has to fit."""
    model = sharp(kind(SPEC))
    prompts = [list(range(prompt)), [1, 2]]
    ids = fk.generate(model, prompts, max_new_tokens=count)
    assert [len(row) for row in ids] == [prompt + count, 2 + count]
    said = [record.getMessage() for record in caplog.records if "max_seq_len" in record.msg]
    assert len(said) == says
    assert all("sees the last 16 tokens alone" in one and f"up to {prompt}," in one for one in said)
    if says:
        message = rf"within max_seq_len 16, but there may be {prompt + count - 1}"
        with pytest.raises(ValueError, match=message):
            fk.generate(model, prompts, max_new_tokens=count, log_probs=True)
    else:
        fk.generate(model, prompts, max_new_tokens=count, log_probs=True)
    fk.generate(Chain(), [list(range(prompt))], max_new_tokens=count, log_probs=True)


NO_INTEGERS = [[1.2, 1.7], [True, False], torch.tensor([True, False]), torch.ones(2), ["1", "2"]]


@pytest.mark.parametrize("samples", NO_INTEGERS)
def test_a_sample_number_is_an_integer(samples):
    with pytest.raises(TypeError, match=r"^samples\[0\] is .*; pass an integer"):
        fk.generate(Chain(), PROMPT, samples=samples)


WRONG = {
    "prompts have shapes": {"prompts": torch.zeros(3)},
    "'temperature' must be >= 0: -0.5": {"temperature": -0.5},
    "'temperature' must be < inf: inf": {"temperature": float("inf")},
    "'temperature' must be >= 0: nan": {"temperature": float("nan")},
    "'top_k' must be >= 1: 0": {"top_k": 0},
    "'top_p' must be > 0: 0.0": {"top_p": 0.0},
    "stop contains": {"stop": [[]]},
    "log_probs=True with top_k None and top_p 0.9": {"top_p": 0.9, "log_probs": True},
    "there are 3 samples for 2 prompts": {"samples": [1, 2, 3]},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_out_of_range_are_refused(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        fk.generate(transformer(), **{"prompts": PROMPT, **WRONG[message]})


UNEVEN = [RAGGED, []]
"""Prompts by data rank, of which one has none."""
GROUPS = [(2, {"dp_shard": 2, "ep": 2}), (2, {"tp": 2}), (2, {"cp": 2})]
MORE = [(2, {"dp_replicate": 2}), (4, {"dp_shard": 2, "tp": 2}), (4, {"dp_shard": 2, "cp": 2})]


def _of_its_own(rank, world, sizes, count):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **sizes}), device="cpu")
    moe = MOE if "ep" in sizes else None
    model = fk.parallelize(transformer(vocab_size=40, moe=moe).double(), mesh)
    data, _ = fk.data_ranks(mesh)
    prompts = UNEVEN[data]
    samples = [10 * data + row for row in range(len(prompts))]
    options = {"samples": samples, "eos_id": 12 + data, "log_probs": True, "seed": 2}
    found = fk.generate(model, prompts, max_new_tokens=count[data], **options)
    again = fk.generate(model, prompts, max_new_tokens=14, samples=samples)
    return prompts, options, count[data], found, again


@pytest.mark.parametrize(("world", "sizes"), first_of(GROUPS, GROUPS + MORE), ids=str)
def test_ranks_continue_prompts_of_their_own_and_those_of_a_layout_the_same(world, sizes):
    """Of other numbers, none at all too; one text ends early and one goes beyond max_seq_len.

    Three positions are no multiple of two ranks of a sequence.
    """
    model = transformer(vocab_size=40, moe=MOE if "ep" in sizes else None).double()
    for prompts, options, count, found, longer in run_again(_of_its_own, world, sizes, [12, 6]):
        assert len(found.ids) == len(found.log_probs) == len(longer) == len(prompts)
        if prompts:
            samples = options["samples"]
            whole = fk.generate(model, prompts, max_new_tokens=14, samples=samples)
            assert all(map(torch.equal, longer, whole))
            ids, likely = fk.generate(model, prompts, max_new_tokens=count, **options)
            assert all(map(torch.equal, found.ids, ids))
            for ours, theirs in zip(found.log_probs, likely, strict=True):
                torch.testing.assert_close(ours, theirs)


NAN = [{}, {"prompts": [[1], [0]], "temperature": 0}]
WRONG_ON_ONE = [
    ({"dp_shard": 2}, [{"max_new_tokens": 1.5}, {}], r"^max_new_tokens is 1.5"),
    ({"dp_shard": 2}, [{"prompts": [[3, 40]]}, {}], r"ids from 3 to 40; vocab_size is 40"),
    ({"dp_shard": 2}, NAN, r"NaN or infinite in 1 of 2 rows \(first: 1\)"),
    ({"tp": 2}, [{}, {"prompts": PROMPT.flip(0)}], r"^ranks 0 to 1 share .* \(tp 2, cp 1\)"),
    ({"cp": 2}, [{}, {"top_k": 2}], r"^ranks 0 to 1 share their sequences \(tp 1, cp 2\)"),
    ({"pp": 2}, [{}, {}], "split into pipeline stages.*layout with pp=1"),
]


def _asked_wrongly(rank, _world):
    for sizes, options, message in WRONG_ON_ONE:
        mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **sizes}), device="cpu")
        model = transformer(vocab_size=40)
        if options is NAN:
            nn.init.constant_(model.embedding.weight[0], float("nan"))
        asked = {"prompts": PROMPT, "max_new_tokens": 2, **options[rank]}
        with pytest.raises(ValueError, match=message):
            fk.generate(fk.parallelize(model, mesh), **asked)


def test_what_is_wrong_on_one_rank_is_raised_on_all():
    run_again(_asked_wrongly, 2)


def test_nothing_is_compiled_for_each_length_also_beyond_the_longest_sequence():
    model, compiled = transformer(), []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    model.layers[0].compile(backend=backend)
    found = fk.generate(model, PROMPT, max_new_tokens=16, temperature=0)
    assert torch.equal(found, greedy(transformer(), PROMPT, 16))
    assert not compiled
