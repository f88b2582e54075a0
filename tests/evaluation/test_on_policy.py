"""Log-probabilities of sampling are those of the training forward, bit for bit, where it is asked.

The other side is the model's own forward over whole texts, ragged, padded or packed, with and
without a head; that it computes the right numbers is held to float64 without tiles.
"""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
from covering import in_turn
from lab import SPEC, build_state, full_tensors, global_batch, head_loss, relative_error
from pool import run_again
from torch.nn.utils.rnn import pad_sequence

import forgekit as fk
from forgekit.model.batch_invariant import log_probs_of

WIDE = attrs.evolve(SPEC, vocab_size=211, max_seq_len=400, qkv_bias=True)
LORA = {"rank": 4, "alpha": 8.0, "targets": ("*.query", "*.down", "*.output")}
TEMPERATURE = 0.8


def build(dtype=torch.float32, lora=None, spec=WIDE, **options):
    """A model that is far from indifferent, its adapters too."""
    model = fk.Transformer(spec, **{"batch_invariant": True, **options})
    if lora:
        model = fk.add_lora(model, **lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(".bias"):
                parameter.mul_(6).add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def prompts_of(count, seed=0, most=70):
    draw = torch.Generator().manual_seed(seed)
    sizes = [1, 16, 63, 64, *torch.randint(1, most, (count,), generator=draw).tolist()][:count]
    return [torch.randint(WIDE.vocab_size, (size,), generator=draw) for size in sizes]


def padded(model, texts):
    """Whole texts as rows, padded behind."""
    return list(model(pad_sequence(texts, batch_first=True)))


def alone(model, texts):
    return [model(text[None])[0] for text in texts]


def headed(model, texts):
    """The log-probability of each next token, without logits."""
    ids = pad_sequence(texts, batch_first=True)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    head = partial(fk.linear_log_probs, labels=labels, temperature=TEMPERATURE)
    return list(model(ids, head=head))


def packed(model, texts):
    """Two texts a row behind padding, in another order, told apart by their ids alone."""
    order, front, logits = torch.randperm(len(texts)).tolist(), texts[0].new_zeros(3), {}
    pairs = [order[first : first + 2] for first in range(0, len(order), 2)]
    ids = [torch.cat([front, *(texts[n] for n in pair)]) for pair in pairs]
    ends = [torch.cat([front - 1, *(torch.full_like(texts[n], n) for n in pair)]) for pair in pairs]
    doc_ids = pad_sequence(ends, batch_first=True, padding_value=-1)
    rows = model(pad_sequence(ids, batch_first=True), doc_ids=doc_ids)
    for pair, row in zip(pairs, rows, strict=True):
        sizes = [len(texts[n]) for n in pair]
        logits.update(zip(pair, row[3 : 3 + sum(sizes)].split(sizes), strict=True))
    return [logits[number] for number in range(len(texts))]


DTYPES = (torch.float32, torch.bfloat16)
ADAPTERS = {"dense": None, "LoRA": LORA, "DoRA": {**LORA, "dora": True}}


def differing(model, prompts, forwards=(padded, alone, packed, headed), **options):
    """How many log-probabilities are sampled, and of how many each forward finds other bits."""
    options = {"temperature": TEMPERATURE, "log_probs": True, **options}
    texts, sampled = fk.generate(model, prompts, **options)
    counts = []
    for forward in forwards:
        with torch.no_grad():
            every = list(forward(model, texts))
        counts.append(0)
        for prompt, text, found, likely in zip(prompts, texts, sampled, every, strict=True):
            places = slice(len(prompt) - 1, len(text) - 1)
            if forward is headed:
                expected = likely[places]
            else:
                new = text[len(prompt) :, None]
                expected = log_probs_of(likely[places], TEMPERATURE).gather(1, new)[:, 0]
            assert found.shape == expected.shape
            counts[-1] += int((found != expected).sum())
    return sum(map(len, sampled)), counts


@pytest.mark.parametrize(("dtype", "adapter"), in_turn(DTYPES, tuple(ADAPTERS)))
def test_log_probs_of_hundreds_of_tokens_are_those_of_training(dtype, adapter):
    """Of one row alone, of few and of many; where the prompts begin, end and cross a block."""
    model, prompts = build(dtype, ADAPTERS[adapter]), prompts_of(7)
    for first, last in ((0, 1), (1, 3), (3, 7)):
        found = differing(model, prompts[first:last], max_new_tokens=66)
        assert found == (66 * (last - first), [0] * 4)


@pytest.mark.oracle
@pytest.mark.parametrize("lora", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_of_100000_tokens_are_those_of_training(dtype, lora):
    model = build(dtype, lora)
    for seed in range(10):
        prompts = prompts_of(100, seed, most=56)
        found = differing(model, prompts, max_new_tokens=100, seed=seed)
        assert found == (10_000, [0] * 4)


def test_bits_do_not_depend_on_how_threads_share_a_loop():
    """A tile has more elements than a thread takes, and three threads share them unevenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model = build(spec=attrs.evolve(WIDE, dim=96, ffn_dim=2752, layers=1))
        texts = prompts_of(9)
        for one, other in zip(padded(model, texts), packed(model, texts), strict=True):
            same = min(len(one), len(other))
            assert torch.equal(one[:same], other[:same])
    finally:
        torch.set_num_threads(before)


def test_without_the_mode_log_probs_differ():
    plain = build(batch_invariant=False)
    total, counts = differing(plain, prompts_of(8), max_new_tokens=25)
    assert min(counts) > 0.05 * total
    texts = prompts_of(5)
    ours, theirs = (torch.cat(padded(model, texts)).detach() for model in (build(), plain))
    assert 0 < float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


def gradients(model, texts, forward):
    weights = torch.Generator().manual_seed(5)
    for one in forward(model, texts):
        likely = one if forward is headed else log_probs_of(one)
        weight = torch.randn(one.shape, generator=weights, dtype=torch.float64)
        (likely * weight).sum().backward(retain_graph=True)
    return full_tensors(model, gradients=True)


FORWARDS = [
    (packed, None, {}),
    (headed, None, {"tied": True, "kv_heads": 6, "qk_norm": False}),
    (padded, ADAPTERS["DoRA"], {}),
]


@pytest.mark.parametrize(("forward", "lora", "changes"), FORWARDS)
def test_gradients_are_those_of_the_ordinary_forward(forward, lora, changes):
    spec, texts = attrs.evolve(WIDE, **changes), prompts_of(5)
    found = gradients(build(torch.float64, lora, spec), texts, forward)
    plain = build(torch.float64, lora, spec, batch_invariant=False)
    assert relative_error(found, gradients(plain, texts, forward)) < 1e-10


def _build_on_ranks(sizes, precision="fp32", lora=None, **options):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **sizes}), device="cpu")
    plain = build(lora=lora, batch_invariant=False)
    return fk.parallelize(plain, mesh, precision=precision, batch_invariant=True, **options)


def _differing_on_ranks(rank, _, precision, lora, options):
    model = _build_on_ranks({"dp_shard": 2}, precision, lora, **options)
    rows = range(3 * rank, 3 + 4 * rank)  # three prompts and four
    prompts = [prompts_of(7)[row] for row in rows]
    return differing(model, prompts, (padded, headed), samples=rows, max_new_tokens=30 + rank)


def test_log_probs_are_those_of_training_on_sharded_ranks():
    options = {"activation_checkpoint": "full", "reshard_after_forward": False}
    found = run_again(_differing_on_ranks, 2, "bf16", LORA, options)
    assert found == [(90, [0, 0]), (124, [0, 0])]


def _steps(rank, world, *options):
    options = options and {"batch_invariant": True, **options[0]}
    state = build_state({"dp_shard": world}, world, dtype=torch.float64, **dict(options))
    step = fk.make_step(head_loss, schedule=fk.constant(1e-2), max_norm=0.5)
    for seed in range(2):
        batches = global_batch(2, seed=seed)
        mine = [torch.cat(row) if world == 1 else row[rank] for row in batches]
        state, _ = step(state, mine)
    return full_tensors(state.model)


def test_steps_of_sharded_ranks_are_those_of_one_ordinary_process():
    expected = _steps(0, 1)
    for found in run_again(_steps, 2, {"activation_checkpoint": "selective"}):
        assert relative_error(found, expected) < 1e-10


REFUSED = {
    "compile is True": {"compile": True},
    "attention is 'sdpa'": {"attention": "sdpa"},
    "precision is 'fp16'": {"precision": "fp16"},
    "head is 'output'": {"head": "output"},
    **{f"{name} is 2": {"sizes": {name: 2}} for name in ("tp", "cp", "pp")},
}


def _refused(_rank, _world):
    for why, options in REFUSED.items():
        with pytest.raises(ValueError, match=f"^the model cannot be batch_inv.*, since {why}: "):
            _build_on_ranks(**{"sizes": {"dp_shard": 2}, **options})


def test_layouts_for_which_it_is_not_proved_are_refused():
    run_again(_refused, 2)


MOE = fk.MoESpec(experts=4, top_k=2, ffn_dim=24)


MINE = type("Mine", (fk.Transformer,), {"forward": None})
PARTS = {
    "'layers.0.feed_forward.experts' has": lambda: build(spec=attrs.evolve(WIDE, moe=MOE)),
    "'dropout' has dropout": lambda: build(spec=attrs.evolve(WIDE, dropout=0.1)),
    "takes neither dropout nor a packed base": lambda: build(lora={**LORA, "base": "nf4"}),
    "Mine does not compute as": lambda: MINE(WIDE, batch_invariant=True),
}


@pytest.mark.parametrize("why", PARTS)
def test_parts_whose_bits_depend_on_others_are_refused(why):
    with pytest.raises(ValueError, match=why):
        PARTS[why]()


def test_a_forward_that_is_compiled_or_under_autocast_is_refused():
    ids, model = torch.arange(9)[None], build()
    model.layers[1].compile(backend="eager")
    # Without gradients: torch warns of those that its compiler looks at between two graphs.
    with torch.no_grad(), pytest.raises(ValueError, match="since it is compiled"):
        model(ids)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast, pytest.raises(ValueError, match="since it runs under autocast"):
        build()(ids)


def test_a_document_that_comes_back_is_refused():
    model = build(spec=SPEC)
    with pytest.raises(ValueError, match="but a document in doc_ids is interrupted by"):
        model(torch.ones(1, 3).long(), doc_ids=torch.tensor([[0, 1, 0]]))
