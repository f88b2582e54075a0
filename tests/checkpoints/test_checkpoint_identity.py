"""Whose a checkpoint is: one of another run, model, optimizer or other data is refused by name."""

from __future__ import annotations

import json
import re
import shutil

import attrs
import pytest
import torch
from lab import full
from pool import run_again
from saved import assert_same, build, everything, momentum, save
from torch import nn

import forgekit as fk

SPEC = fk.TransformerSpec(
    vocab_size=11, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=8, max_seq_len=8, head_dim=4
)
MOE = attrs.evolve(SPEC, moe=fk.MoESpec(experts=4, top_k=2, ffn_dim=4))
HEADS = {"heads": 8, "kv_heads": 4, "head_dim": 2}
LINEAR = fk.RopeScaling(kind="linear", factor=2.0)


def of(spec, **lora):
    model = fk.Transformer(spec)
    model = fk.add_lora(model, rank=2, **lora) if lora else model
    return fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def changed(spec=SPEC, **changes):
    return lambda: of(spec), lambda: of(attrs.evolve(spec, **changes))


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Later(fk.TrainState):
    phase: torch.Tensor


def linears(*sizes, optimizer=momentum, kind=fk.TrainState, held=slice(None), **fields):
    model = nn.Sequential(*(nn.Linear(size, size) for size in sizes or (3, 2)))
    state = kind.create(model, optimizer([*model.parameters()][held]), **fields)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    return state


def like(**options):
    return lambda: linears(**options)


OTHER_LORA = (
    r"of another model: 'layers\.0\.\S*lora_A' is .*'alpha': 8\.0, .*'rslora': False\} there "
    r"and .*'alpha': 16\.0, .*'rslora': True\}"
)
STATES = {
    "shape": (linears, lambda: linears(3, 4), r"another model: '1.weight' is float32 \[2, 2\] th"),
    "name": (linears, lambda: linears(3), "another model: only it has '1.weight'"),
    "fewer held": (linears, like(held=slice(2)), "over other parameters: only it has '1.weight'"),
    "optimizer": (linears, like(optimizer=torch.optim.Adam), "is SGD there and Adam here"),
    "field": (linears, like(kind=Later, phase=torch.ones(1)), "other fields: it lacks 'phase'"),
    "heads": (*changed(**HEADS), "of another model: .*'heads' is 4 there and 8"),
    "rope_scaling": (*changed(rope_scaling=LINEAR), "of another model: .*'rope_scaling"),
    "top_k": (*changed(MOE, moe=attrs.evolve(MOE.moe, top_k=1)), "another model: .*'moe.top_k'"),
    "lora": (lambda: of(SPEC, alpha=8.0), lambda: of(SPEC, alpha=16.0, rslora=True), OTHER_LORA),
}


@pytest.mark.parametrize(("make", "other", "message"), STATES.values(), ids=STATES)
def test_another_model_or_optimizer_is_refused_and_nothing_changes(tmp_path, make, other, message):
    fk.checkpoint_save(make(), tmp_path, blocking=True)
    state = other()
    before = everything(state)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path)
    assert_same(everything(state), before)
    if "lora" in message:  # a new run from the model alone has other settings, and this one not
        with pytest.raises(fk.CheckpointError, match=message):
            fk.checkpoint_load(state, tmp_path, parts=("model",))


def test_what_a_run_may_change_of_its_model_is_no_fact_of_it(tmp_path):
    fk.checkpoint_save(of(MOE), tmp_path, blocking=True)
    loads = attrs.evolve(MOE.moe, aux_loss=0.1, capacity=2.0)
    fk.checkpoint_load(of(attrs.evolve(MOE, max_seq_len=16, dropout=0.1, moe=loads)), tmp_path)
    longer = attrs.evolve(MOE, rope_theta=1e6, max_seq_len=64)  # a new run's context
    fk.checkpoint_load(of(longer), tmp_path, parts=("model",))
    with pytest.raises(fk.CheckpointError, match="'heads' is 4 there and 8 here"):
        fk.checkpoint_load(of(attrs.evolve(longer, **HEADS)), tmp_path, parts=("model",))


FACTS = {
    *("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "head_dim"),
    *("qk_norm", "tied", "rope_theta", "norm_eps", "moe", "rope_scaling"),
}
"""What the first checkpoints have; a fact more, and they would be refused for lack of it."""


def test_a_trait_that_came_later_is_no_fact_and_is_seen_by_its_tensors(tmp_path):
    fk.checkpoint_save(of(SPEC), tmp_path, blocking=True)
    manifest = json.loads((tmp_path / "latest" / "manifest.json").read_text())
    assert manifest["model"].keys() == FACTS
    with pytest.raises(fk.CheckpointError, match=r"it lacks 'layers\.0\.attention\.query\.bias'"):
        fk.checkpoint_load(of(attrs.evolve(SPEC, qkv_bias=True)), tmp_path)


def test_a_checkpoint_of_another_run_is_refused_and_a_copy_of_one_is_not(tmp_path):
    one, other, copy, alone = (tmp_path / name for name in "abcd")
    save(one, 1, 2)
    shutil.copytree(one, copy, symlinks=True)
    shutil.copytree(one / "step_00000002", alone / "step_00000002")
    for folder in (copy, alone):
        save(folder, 3, state=fk.checkpoint_load(build(), folder))
        assert fk.checkpoint_load(build(), folder).step == 3
    save(other, 5)
    shutil.copytree(other / "step_00000005", one / "step_00000005")
    with pytest.raises(fk.CheckpointError, match="newest are of steps 2 and 5"):
        fk.checkpoint_load(build(), one)
    assert fk.checkpoint_load(build(), one, step=2).step == 2


# Data


DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13]]
OTHER = [[1, 2, 3, 4, 6], *DOCUMENTS[1:]]


def windows(out, seq_len=4, documents=DOCUMENTS, tokenizer="a", **options):
    folder = out / f"tokens-{documents[0][4]}{tokenizer}"
    if not folder.exists():
        fk.write_tokens(folder, documents, vocab_size=20, eos_id=0)
        (folder / "tokenizer.json").write_text(tokenizer)
    return fk.token_dataset(folder, seq_len, **options)


def mixed(out, seq_len=4):
    rows = {"a": windows(out, seq_len), "b": windows(out, seq_len, documents=OTHER)}
    sizes = {name: len(dataset) for name, dataset in rows.items()}
    return fk.mixture_dataset(rows, fk.make_order(sizes, seed=0))


LENGTHS = ", ".join(rf"sources: {name}: sequence length \(4 then, 5 now\)" for name in "ab")
DATA = {
    "doc_ids": (windows, {"doc_ids": True}, r"doc_ids \(False then, True now\)\. Choose an"),
    "files and tokenizer": (windows, {"documents": OTHER, "tokenizer": "b"}, r"files, tokenizer\."),
    "length of sources": (mixed, {"seq_len": 5}, rf"order, {LENGTHS}\."),
}


@pytest.mark.parametrize(("make", "change", "message"), DATA.values(), ids=DATA)
def test_other_data_are_refused_by_what_changed(tmp_path, make, change, message):
    then, now = make(tmp_path).fingerprint, make(tmp_path, **change).fingerprint
    fk.checkpoint_save(build(step=2), tmp_path / "a", fingerprint=then, blocking=True)
    state = build()
    with pytest.raises(fk.CheckpointError, match=f"other data, which differ in {message}"):
        fk.checkpoint_load(state, tmp_path / "a", fingerprint=now)
    assert state.step == 0
    again = fk.checkpoint_load(state, tmp_path / "a", fingerprint=make(tmp_path).fingerprint)
    again = fk.checkpoint_load(again, tmp_path / "a")  # nothing to compare
    allowed = fk.checkpoint_load(again, tmp_path / "a", fingerprint=now, allow_other_data=True)
    assert allowed.step == 2


def test_data_are_compared_as_far_as_they_were_seen(tmp_path):
    upto = {"fingerprint": lambda samples: ["phases up to", samples]}
    save(tmp_path, 1, 2, **upto)
    assert fk.checkpoint_load(build(), tmp_path, **upto).step == 2
    message = r"\['phases up to', 8\] then, 'other' now\)\. Choose"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(build(), tmp_path, fingerprint=lambda _: "other")


# Renames


class Block(nn.Module):
    """A block whose module is called as the program calls it today."""

    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.Linear(3, 3))
        self.register_buffer("seen", torch.zeros(2))


def blocks(names, seed=0, mesh=None):
    """A state of which no two tensors that are saved are alike."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(name) for name in names)).double()
    if mesh is not None:
        fk.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, average=fk.EMA(0.5))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 + number)
    optimizer.step()
    for number, value in enumerate([*model.buffers(), *state.average.values.values()]):
        value.add_(number + seed)
    return state


def contents(state):
    averages = {f"average.{n}": full(v).clone() for n, v in state.average.values.items()}
    return everything(state) | averages


MLP, NOW = ("mlp", "mlp"), ("ffn", "up")
OF_0 = {"0.ffn.weight": "0.mlp.weight", "0.ffn.bias": "0.mlp.bias"}
RENAMES = {
    "tensors and a module": (NOW, OF_0 | {"1.up": "1.mlp"}, {"0.mlp": "0.ffn", "1.mlp": "1.up"}),
    "exchanged": (MLP, {"0": "1", "1": "0"}, {"0.": "1.", "1.": "0."}),
}
"""Names of today, what is passed, and what each old name has become."""


def rename(rank, world, directory, case):
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu") if world > 1 else None
    saved, (names, renames, now) = blocks(MLP, 0, mesh), RENAMES[case]
    fk.checkpoint_save(saved, directory, blocking=True)
    found = contents(fk.checkpoint_load(blocks(names, 1, mesh), directory, renames=renames))
    then = re.compile("|".join(map(re.escape, now)))
    expected = contents(saved).items()
    assert_same(found, {then.sub(lambda old: now[old[0]], name): v for name, v in expected})


@pytest.mark.parametrize(("case", "world"), [("tensors and a module", 1), ("exchanged", 2)])
def test_a_rename_takes_optimizer_state_buffers_and_averages_along(tmp_path, world, case):
    run_again(rename, world, str(tmp_path), case)


UP = {"1.up": "1.mlp"}
REFUSED = [
    (UP | {"0.ffn": "0.mpl"}, r"of another model: it lacks '0\.ffn\.weight'"),
    (UP | {"0.ffn": "0.mlp", "0.seen": "1.seen"}, r"^renames maps two .* the name '0\.seen'"),
]


@pytest.mark.parametrize(("renames", "message"), REFUSED)
def test_renames_that_do_not_fit_are_refused_before_anything_changes(tmp_path, renames, message):
    fk.checkpoint_save(blocks(MLP), tmp_path, blocking=True)
    state = blocks(NOW, 1)
    before = contents(state)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path, renames=renames)
    assert_same(contents(state), before)
