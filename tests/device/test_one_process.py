"""One process on the pretend device: everything around a step, as on the CPU."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
from device.pretend import NAME, watching
from distributed.models import adamw, head_loss, logits_loss
from lab import SPEC, full_tensors, lay_out, relative_error
from pool import run_ranks
from tensordict import TensorDict

import forgekit as fk

SETUP = "device.pretend:install"


ONLY = "device is 'pretend:{}', but this process sees only pretend:0"
CHOSEN = {
    ("pretend:1", 2, 1): 1,
    (None, 2, 1): 0,
    ("pretend:1", 1, 1): ONLY.format(1) + r"\. Use 'pretend', which",
    ("pretend:1", 2, 2): "this rank, 0 on its machine, gets pretend:0. Use 'pretend': each rank",
    ("cuda", 1, 1): "'cuda', but torch finds no such device here; it finds pretend and cpu",
}
"""What is asked for, of how many devices, by the first of how many ranks: a device or a refusal."""


def choose(_rank, _world):
    for (device, count, started), expected in CHOSEN.items():
        with pytest.MonkeyPatch.context() as patch:
            if started > 1:
                for name, value in {"RANK": 0, "WORLD_SIZE": started, "LOCAL_RANK": 0}.items():
                    patch.setenv(name, str(value))
            module, chosen = torch.get_device_module(NAME), []
            patch.setattr(module, "device_count", lambda count=count: count)
            patch.setattr(module, "set_device", chosen.append)
            if isinstance(expected, int):
                fk.build_mesh(device=device)
                assert chosen[0] == expected
            else:
                with pytest.raises(ValueError, match=expected):
                    fk.build_mesh(device=device)
                assert chosen == []


def test_one_process_computes_on_the_device_that_it_chose_and_on_no_other():
    run_ranks(choose, 1, setup=SETUP)


# Around the step


def data(rows=24):
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, SPEC.vocab_size, (rows, 13), generator=draw)
    return [TensorDict({"input_ids": row[:-1], "labels": row[1:]}, []) for row in ids]


def packed(batch):
    """Two documents in each row."""
    doc_ids = (torch.arange(12) >= 5).long().expand(2, 12).contiguous()
    position_ids = (torch.arange(12) - 5 * doc_ids[0]).expand(2, 12).contiguous()
    tensors = {**batch, "doc_ids": doc_ids, "position_ids": position_ids}
    return TensorDict(tensors, [2])


def autocast(model, batch):
    with torch.autocast(batch["labels"].device.type, dtype=torch.bfloat16):
        return logits_loss(model, batch)


def loader(device=None, **options):
    return fk.make_loader(data(), 2, workers=1, device=device, epochs=1, **options)


def new_state(device, dtype=torch.float64):
    spec = attrs.evolve(SPEC, qk_norm=dtype is torch.float64)  # autocast on a CPU warns of it
    model = fk.Transformer(spec, seed=0).to(device, dtype)
    return fk.TrainState.create(model, adamw(model), seed=0)


def differences(found, expected):
    there, here = full_tensors(found.model), full_tensors(expected.model)
    return relative_error({n: t.cpu() for n, t in there.items()}, here)


# What ``benchmarks/gpu.py`` compares with the CPU, on this device too.
STEPS = {
    "logits": (logits_loss, torch.float64, False, 1e-11),
    "head": (head_loss, torch.float64, False, 1e-11),
    "packed": (head_loss, torch.float64, True, 1e-11),
    "autocast": (autocast, torch.float32, False, 3e-3),
}


def two_steps(device):
    """The difference to the CPU after two steps, and its bound, for each of ``STEPS``."""
    for name, (loss_fn, dtype, is_packed, bound) in STEPS.items():
        batches = [packed(batch) if is_packed else batch for batch in loader()][:6]
        states = [new_state(where, dtype) for where in ("cpu", device)]
        for index, state in enumerate(states):
            step = fk.make_step(loss_fn, schedule=fk.constant(1e-2), max_norm=0.5)
            for group in (batches[:3], batches[3:]):
                state, _ = step(state, group)
            states[index] = state
        yield name, float(differences(states[1], states[0])), bound


def step_in_fp16(_rank, _world, device):
    with torch.device("meta"):
        model = fk.Transformer(SPEC)
    options = {"precision": "fp16", "activation_checkpoint": "full"}
    state = lay_out(model, device=device, **options)
    state = attrs.evolve(state, loss_scale=state.loss_scale * LARGE_SCALE)
    schedule = fk.warmup_cosine(peak=0.01, warmup=1, total=8)
    step = fk.make_step(head_loss, schedule=schedule, max_norm=0.5)
    for batch in [*loader()][:6]:
        with watching() as ledger:
            state, metrics = step(state, [batch])
    assert not ledger.waits, ledger.waits[0]
    return state.loss_scale.item(), metrics["loss"].item(), int(state.skipped)


LARGE_SCALE = 2.0**17


def test_loss_scaling_in_fp16_finds_its_scale_on_the_device():
    (found,) = run_ranks(step_in_fp16, 1, NAME, setup=SETUP)
    (expected,) = run_ranks(step_in_fp16, 1, "cpu")
    assert found == pytest.approx(expected, rel=2e-3)
    assert found[0] < LARGE_SCALE / 4
    assert found[2] == 0


def prefetch(_rank, _world):
    seen = []
    with loader(NAME, ahead=2) as there, watching() as ledger:
        for batch in there:
            seen.append(batch.apply(torch.clone))
            assert {t.device.type for t in batch.values()} == {NAME}
    assert not ledger.waits, ledger.waits[0]
    assert ledger.copied["pageable"] == 0
    expected = list(loader())
    assert len(seen) == len(expected) == 12
    for found, batch in zip(seen, expected, strict=True):
        assert all(torch.equal(found[key].cpu(), batch[key]) for key in batch.keys())  # noqa: SIM118


def test_a_loader_brings_batches_to_the_device_without_a_wait():
    run_ranks(prefetch, 1, group=False, setup=SETUP)


def evaluate_and_generate(_rank, _world):
    here, there = new_state("cpu"), new_state(NAME)
    expected = fk.evaluate(here, loader(), head_loss)
    with watching() as ledger:
        found = fk.evaluate(there, loader(NAME), head_loss)
    assert not ledger.waits, ledger.waits[0]
    assert found["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-13)
    prompt, best = torch.arange(3)[None], {"max_new_tokens": 5, "temperature": 0.0}
    ids = fk.generate(there.model, prompt.to(NAME), **best)
    assert ids.tolist() == fk.generate(here.model, prompt, **best).tolist()
    draw = partial(fk.generate, there.model, prompt.to(NAME), max_new_tokens=8)
    first, again, other = (draw(seed=seed).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_evaluation_and_generation():
    run_ranks(evaluate_and_generate, 1, group=False, setup=SETUP)
