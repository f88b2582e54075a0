"""Adapters in the layout of peft, both ways: peft and transformers are the oracles."""

from __future__ import annotations

import json
import math
from functools import partial
from operator import itemgetter

import adapted
import attrs
import pytest
import torch
from adapted import build, move
from covering import first_of, some_of
from huggingface_models import logits_of, make_model, some_ids
from lab import alone, full_tensors, relative_error
from pool import run_again
from safetensors.torch import load_file, save_file
from saved import assert_same, truncate
from torch import nn

import forgekit as fk

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
IDS = some_ids(shape=(2, 12))
KINDS = {
    "dense": partial(make_model, "Qwen3 untied"),
    "tied": partial(make_model, "Qwen3"),
    "experts": partial(make_model, "Qwen3Moe", decoder_sparse_step=1),
}


def ours(theirs, folder, adapters=()):
    """Our model of the same weights; of a tied one with a copy of its embedding as the head.

    Adapters are added before the weights are loaded.
    """
    theirs.save_pretrained(folder)
    spec = fk.huggingface_spec(folder)
    model = fk.Transformer(spec).eval()
    for each in adapters:
        fk.add_lora(model, **each)
    fk.load_huggingface(model, folder)
    if not spec.tied:
        return model
    untied = fk.Transformer(attrs.evolve(spec, tied=False)).eval()
    untied.load_state_dict({**model.state_dict(), "output.weight": model.embedding.weight})
    return untied


def distance(one, other):
    return relative_error({"": one}, {"": other})


MANY = ("*.query", "*.value", "*.down", "output")
REST = {"rank": 3, "alpha": 20.0, "targets": ("*.gate", "*.up")}
OURS = {
    "dense": ({"targets": MANY}, REST),
    "dense, lengths": ({"targets": ("*.query", "*.up"), "dora": True},),
    "dense, roots": ({"targets": ("*.gate",), "rslora": True},),
    "experts, beside them": ({"targets": ("*.query", "*.key")},),
}


@pytest.mark.parametrize("case", some_of(OURS, "dense, roots"))
def test_peft_opens_our_adapter_and_so_do_we(case, tmp_path):
    import peft

    theirs = KINDS[case.split(",")[0]]
    adapters = [{"rank": 4, "alpha": 16.0, **each} for each in OURS[case]]
    other = theirs()
    model = ours(other, tmp_path / "base")
    before = model(IDS)
    for each in adapters:
        fk.add_lora(model, **each)
    expected = move(model)(IDS)
    fk.save_adapter(model, tmp_path / "adapter", base="somewhere")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == "somewhere"
    opened = peft.PeftModel.from_pretrained(other, tmp_path / "adapter").eval()
    assert distance(expected, before) > 0.01
    assert distance(logits_of(opened, IDS), expected) < 1e-5
    for held in ((), adapters):
        again = ours(theirs(), tmp_path / "again", held)
        fk.load_adapter(again, tmp_path / "adapter")
        assert_same(full_tensors(again), full_tensors(model))


ROWS = ["q_proj", "v_proj", "down_proj", "lm_head"]
PATTERNS = {
    "rank_pattern": {"v_proj": 3, r"layers\.1\.self_attn\.q_proj": 5},
    "alpha_pattern": {"down_proj": 24},
}
THEIRS = {
    "dense": (ROWS, PATTERNS),
    "dense, lengths": (["k_proj", "up_proj"], {"use_dora": True}),
    "dense, roots": (["o_proj"], {"use_rslora": True}),
    "tied, the head": (["lm_head", "q_proj"], {}),
}


@pytest.mark.parametrize("case", some_of(THEIRS, "dense, roots"))
def test_we_open_an_adapter_of_peft(case, tmp_path):
    import peft

    theirs, (targets, options) = KINDS[case.split(",")[0]], THEIRS[case]
    model = ours(theirs(), tmp_path / "base")
    options = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options}
    config = peft.LoraConfig(target_modules=targets, **options)
    wrapped = move(peft.get_peft_model(theirs(), config).eval())
    expected = logits_of(wrapped, IDS)
    wrapped.save_pretrained(tmp_path / "adapter")
    before = model(IDS)
    fk.load_adapter(model, tmp_path / "adapter")
    assert distance(model(IDS), before) > 0.01
    assert distance(model(IDS), expected) < 1e-5
    fk.merge_lora(model)
    assert distance(model(IDS), expected) < 1e-5
    if case.startswith("tied"):
        tied = fk.Transformer(fk.huggingface_spec(tmp_path / "base"))
        with pytest.raises(fk.CheckpointError, match=r"'lm_head', which this .*; build a tied"):
            fk.load_adapter(tied, tmp_path / "adapter")


LAYOUTS = (("lengths", {"dp_shard": 1, "tp": 2}), ("plain", {"dp_shard": 1, "pp": 2}))
MORE = (("plain", {"dp_shard": 2}), ("beside experts", {"dp_shard": 2, "ep": 2}))
WIDER = (("plain", {"dp_shard": 2, "tp": 2}), ("beside experts", {"dp_shard": 1, "tp": 2, "pp": 2}))


def facts_of(folder):
    """The configuration, whose lists have no order."""
    config = json.loads((folder / CONFIG).read_text())
    return {name: sorted(v) if isinstance(v, list) else v for name, v in config.items()}


def _move_through(rank, world, folder, layouts):
    """Save and load in each layout; files are those of one process, and values come back."""
    for number, (kind, sizes) in enumerate(layouts):
        mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
        model = fk.parallelize(move(build(kind)), mesh)
        fk.save_adapter(model, folder / str(number))
        other = fk.parallelize(build(kind), mesh)
        fk.load_adapter(other, folder / kind)
        assert_same(full_tensors(other), full_tensors(model))
        if rank == 0:
            assert_same(*(load_file(folder / name / TENSORS) for name in (str(number), kind)))
            assert facts_of(folder / str(number)) == facts_of(folder / kind)


@pytest.mark.parametrize(
    ("world", "layouts"), first_of([(2, LAYOUTS)], [(2, LAYOUTS), (2, MORE), (4, WIDER)])
)
def test_every_layout_writes_the_files_of_one_process_and_reads_them(world, layouts, tmp_path):
    for kind in {kind for kind, _ in layouts}:
        fk.save_adapter(move(build(kind)), tmp_path / kind)
    run_again(_move_through, world, tmp_path, layouts)


def test_a_foreign_model_keeps_its_own_names(tmp_path):
    again, model = (nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)) for _ in range(2))
    again.load_state_dict(model.state_dict())
    saved = move(fk.add_lora(model, rank=2, alpha=8.0, targets=("0", "1")))
    fk.save_adapter(saved, tmp_path / "adapter")
    assert "base_model.model.0.lora_A.weight" in load_file(tmp_path / "adapter" / TENSORS)
    fk.load_adapter(again, tmp_path / "adapter")
    assert_same(full_tensors(again), full_tensors(saved))


def plain(**changes):
    return fk.Transformer(attrs.evolve(adapted.SPEC, **changes))


def in_file(change, folder):
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


def odd(folder):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | ODD))


def same(folder):
    pass


STRANGE = {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)}
VERA = {"x.vera_lambda": torch.ones(1)}
ODD = {"bias": "all", "peft_type": "VERA", "modules_to_save": ["lm_head"]}
ODD |= {"init_lora_weights": "pissa"}
LESS = adapted.PLAIN[0] | {"alpha": 12.0}


def other_scale():
    model = plain()
    for each in (LESS, *adapted.PLAIN[1:]):
        fk.add_lora(model, **each)
    return model


LOADED = [
    (same, lambda: plain(dim=48), r"need \{'A': \(\d, 48\)"),
    (same, lambda: fk.add_lora(plain(), targets="*.query"), "/adapter: only it has '"),
    (same, other_scale, "scale 4 and dora=False there and rank 4, scale 3 and dora=False here"),
    (partial(in_file, lambda t: t.update(STRANGE)), plain, "this model does not have"),
    (partial(in_file, lambda t: t.pop(min(t))), plain, r"has \{'B': .* need \{'A': "),
    (partial(in_file, lambda t: t.update(VERA)), plain, "vera_lambda', not base"),
    (partial(in_file, lambda t: t[min(t)].fill_(math.nan)), plain, "values that are not finite"),
    (lambda folder: truncate(folder / TENSORS), plain, "/adapter: SafetensorError: "),
    (odd, plain, r"='VERA', bias='all', init_lora_weights='pissa', modules_to_save=\['lm"),
]


@pytest.mark.parametrize("case", LOADED, ids=itemgetter(2))
def test_an_adapter_of_another_base_is_refused_and_changes_nothing(case, tmp_path):
    (change, model, message), folder = case, tmp_path / "adapter"
    fk.save_adapter(move(build("plain")), folder)
    change(folder)
    before = full_tensors(target := model())
    with pytest.raises(fk.CheckpointError, match=message):
        fk.load_adapter(target, folder)
    assert_same(full_tensors(target), before)


OF_EXPERTS = {
    "rewritten": (["gate_proj", "up_proj", "down_proj", "k_proj"], {}),
    "down": (["q_proj"], {"target_parameters": ["mlp.experts.down_proj"]}),
}


@pytest.mark.parametrize("case", OF_EXPERTS)
def test_an_adapter_of_experts_is_refused_with_how_to_merge_it(case, tmp_path):
    import peft

    theirs, (targets, options) = KINDS["experts"], OF_EXPERTS[case]
    config = peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **options)
    move(peft.get_peft_model(theirs(), config)).save_pretrained(tmp_path / "adapter")
    before = full_tensors(model := ours(theirs(), tmp_path / "base"))
    message = r"/adapter: 'model\.layers\.\d\.mlp\.experts.*' is an adapter of experts, .* with pe"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.load_adapter(model, tmp_path / "adapter")
    assert_same(full_tensors(model), before)


def test_an_export_has_adapters_of_experts_merged_and_none_beside_it(tmp_path):
    from transformers import AutoModelForCausalLM

    adapters = [{"rank": 4, "targets": ("*.experts", "*.key")}]
    model = ours(KINDS["experts"](), tmp_path / "base", adapters)
    state = alone(move(model))
    expected = model(IDS)
    fk.huggingface.export_tuned(state, tmp_path / "run", tmp_path / "tuned", base=tmp_path / "base")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    assert distance(logits_of(opened, IDS), expected) < 1e-5
    assert not (tmp_path / "run" / "adapter").exists()


def merged():
    fk.merge_lora(model := build("plain"))
    return model


def trained():
    model = build("plain")
    model.norm.weight.requires_grad_(True)
    return model


SAVED = [
    (trained, r"1 trained parameters .*'norm\.weight'"),
    (merged, "the file is for a base without them"),
    (partial(build, "dense"), r"has DoRA, but '.*' does not"),
    (partial(build, "experts"), r"'layers\.1\..*\.experts\..*' is an adapter of experts, .*merge"),
]


@pytest.mark.parametrize(("model", "message"), SAVED)
def test_what_a_file_could_not_say_is_not_saved(model, message, tmp_path):
    with pytest.raises((ValueError, fk.CheckpointError), match=message):
        fk.save_adapter(model(), tmp_path / "adapter")
    assert not any(tmp_path.iterdir())


def test_directories_of_others_are_not_replaced(tmp_path):
    fk.save_adapter(build("plain"), tmp_path)
    fk.save_adapter(build("plain"), tmp_path)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(fk.CheckpointError, match="README"):
        fk.save_adapter(build("plain"), tmp_path)
