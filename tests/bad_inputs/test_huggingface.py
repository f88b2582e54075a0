"""Hugging Face directories that are damaged, of other models, or have what is not had here."""

from __future__ import annotations

import json
from contextlib import nullcontext

import attrs
import pytest
import torch
from lab import full_tensors
from safetensors.torch import load_file, save_file
from saved import assert_same, truncate
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import forgekit as fk
from forgekit.huggingface import families
from forgekit.huggingface.names import NameMap, join, leave_out, pad, rename, split, stack

SPEC = fk.TransformerSpec(
    vocab_size=16, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=32
)
MOE = fk.MoESpec(experts=4, top_k=2, ffn_dim=8, shared=0)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(tmp_path):
    fk.save_huggingface(fk.Transformer(SPEC), tmp_path / "saved", max_shard_size=4_000)
    return tmp_path / "saved"


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


UNSUPPORTED = (
    *("attention_bias", "mlp_bias", "hidden_act", "attention_dropout", "router_jitter_noise"),
    *("partial_rotary_factor", "quantization_config", "kv_lora_rank", "q_lora_rank"),
    *("moe_layer_freq", "layer_types"),
)
KINDS = ["linear_attention", "full_attention"]


def rope(kind, **values):
    parameters = {"rope_type": kind, "rope_theta": 1e4, **values}
    return {"rope_parameters": parameters, "rope_scaling": None}


EXPERTS = families.family_named("qwen3_moe").write(
    attrs.evolve(SPEC, moe=MOE, qk_norm=True, layers=5)
)
CONFIGS = [
    *(({key: KINDS}, rf"{key} is .*; a Transformer supports only ") for key in UNSUPPORTED),
    ({"sliding_window": 8}, r"sliding_window is 8, the context 32; .* max_seq_len=8\)"),
    (rope("default", partial_rotary_factor=0.5), r"have partial_rotary_factor 0\.5, which a Tra"),
    (rope("default", full_attention={}), r"have full_attention .*; all layers share one set"),
    (rope("longrope", factor=2.0), r"rope_type is 'longrope'; a Transformer supports \['linear', "),
    ({"rope_theta": 7.0}, r"rope_theta is 7\.0, but 10000\.0 in rope_parameters"),
    ({"tie_word_embeddings": "false"}, r"tie_word_embeddings is 'false'; it must be true or fals"),
    ({"model_type": "gpt_neox"}, r"model_type 'gpt_neox' is not one of llama, mistral, "),
    ({**EXPERTS, "mlp_only_layers": [1]}, r"give the blocks \[0, 2, 3, 4\] experts"),
    ({**EXPERTS, "norm_topk_prob": "false"}, r"norm_topk_prob is 'false'; it must be true"),
]


def test_configurations_that_are_none_of_ours_are_refused():
    for changes, message in CONFIGS:
        changed = families.family_named("llama").write(SPEC) | changes
        with pytest.raises(fk.CheckpointError, match=message):
            families.family_of(changed).read(changed)


USED, MIXED = {"use_sliding_window": True}, ["full_attention", "sliding_attention"]
WINDOWS = [
    ("mistral", {}, True),
    ("qwen3", {}, False),
    ("qwen3", {**USED, "max_window_layers": 1}, True),
    ("qwen3", {**USED, "max_window_layers": 2}, False),
    ("qwen3", {**USED, "max_window_layers": 2, "layer_types": MIXED}, True),
    ("qwen3", {**USED, "max_window_layers": 1, "layer_types": MIXED[:1] * 2}, False),
    ("qwen3_moe", {}, False),
    ("qwen3_moe", USED, True),
    ("dots1", {"max_window_layers": 1}, True),
    ("dots1", {"max_window_layers": 2}, False),
]


@pytest.mark.parametrize(("name", "changes", "slides"), WINDOWS)
def test_a_window_counts_where_transformers_has_one(name, changes, slides):
    family = families.family_named(name)
    moe = attrs.evolve(MOE, **family.router)
    spec = attrs.evolve(SPEC, qk_norm=family.has_qk_norm, moe=moe if family.experts else None)
    config = {**family.write(spec), "layer_types": None, "sliding_window": 8, **changes}
    refused = pytest.raises(fk.CheckpointError, match="sliding_window is 8, the context 32")
    with refused if slides else nullcontext():
        family.read(config)
    assert family.read(config, 8).max_seq_len == 8


def first(saved):
    return min(saved.glob("*.safetensors"))


def listed(saved):
    return json.loads((saved / INDEX).read_text())["weight_map"]


def resave(edit):
    """Change the first file's tensors, and the index with them."""

    def damage(saved):
        tensors = load_file(first(saved))
        edit(tensors)
        kept = {name: file for name, file in listed(saved).items() if file != first(saved).name}
        save_file(tensors, first(saved))
        change(saved / INDEX, weight_map={**kept, **dict.fromkeys(tensors, first(saved).name)})

    return damage


def list_more(saved):
    change(saved / INDEX, weight_map={**listed(saved), "lm_head.bias": first(saved).name})


EMBEDDING = "model.embed_tokens.weight"
BIAS = {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}
WHOLE = {EMBEDDING: torch.ones(16, 16, dtype=torch.int8)}
FILES = {
    "a file cut short": (lambda saved: truncate(first(saved)), "is missing, damaged or incomp"),
    "a tensor less": (resave(lambda t: t.pop(EMBEDDING)), r"it lacks 'model\.embed\S+' \(nearest"),
    "a bias": (resave(lambda t: t.update(BIAS)), r"only it has 'model\.layers\.0\.self_attn\.q_p"),
    "whole numbers": (resave(lambda t: t.update(WHOLE)), r"is torch\.int8, but the model's is "),
    "an index of more": (list_more, r"the index .* not fit its files: only it has 'lm_head\.bias"),
    "no index": (lambda saved: (saved / INDEX).unlink(), r"has neither model\.safetensors nor "),
    "no JSON": (lambda saved: (saved / "config.json").write_text("{"), "cannot be read: JSONDecod"),
}


@pytest.mark.parametrize(("damage", "message"), FILES.values(), ids=FILES)
def test_damaged_directories_are_refused_and_nothing_is_loaded(saved, damage, message):
    damage(saved)
    model = fk.Transformer(SPEC, seed=7)
    before = full_tensors(model)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.load_huggingface(model, saved)
    assert_same(full_tensors(model), before)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_values_that_are_none_are_found_while_they_are_read(value, saved):
    """Not at the first row of metrics, where the data would be blamed."""
    resave(lambda tensors: tensors[EMBEDDING][7].fill_(value))(saved)
    with pytest.raises(fk.CheckpointError, match=r"'model\.embed_tokens\.weight' .* not finite"):
        fk.load_huggingface(fk.Transformer(SPEC), saved)


OTHERS = {
    "layers 2": {"layers": 1},
    "norm_eps 1e-05": {"norm_eps": 1e-6},
    "rope_type 'default'": {"rope_scaling": fk.RopeScaling(kind="linear", factor=2.0)},
    "tied False": {"tied": True},
    r"moe\.experts None": {"moe": MOE},
}


def test_directories_of_other_models_are_refused(saved):
    for there, changes in OTHERS.items():
        model = fk.Transformer(attrs.evolve(SPEC, **changes))
        with pytest.raises(fk.CheckpointError, match=rf"is of another model: .*{there} there and "):
            fk.load_huggingface(model, saved)


def test_what_cannot_be_loaded_into_is_refused(saved):
    change(saved / "config.json", tie_word_embeddings=True, vocab_size=None)
    with pytest.raises(fk.CheckpointError, match=r"/saved: TypeError: "):
        fk.huggingface_spec(saved)
    change(saved / "config.json", vocab_size=16)
    with pytest.raises(fk.CheckpointError, match=r"lm_head\.weight differs from model\.embed_tok"):
        fk.load_huggingface(fk.Transformer(attrs.evolve(SPEC, tied=True)), saved)
    with torch.device("meta"):
        model = fk.Transformer(SPEC)
    with pytest.raises(ValueError, match=r"^'embedding\.weight' is on meta, so it has no memory"):
        fk.load_huggingface(model, saved)


EXPORTS = [
    ({}, "qwen3", r"^Qwen3ForCausalLM cannot express this spec: qk_norm True there and False"),
    ({"router": "sigmoid"}, None, r"LlamaForCausalLM cannot .* Dots1ForCausalLM cannot"),
    ({"capacity": 1}, None, r"moe\.capacity is 1, and it drops no"),
]


@pytest.mark.parametrize(("moe", "like", "message"), EXPORTS)
def test_exports_that_cannot_be_are_refused_and_leave_nothing(tmp_path, moe, like, message):
    model = fk.Transformer(attrs.evolve(SPEC, moe=attrs.evolve(MOE, **moe) if moe else None))
    with pytest.raises((ValueError, fk.CheckpointError), match=message):
        fk.save_huggingface(model, tmp_path / "new", like=like)
    assert list(tmp_path.iterdir()) == []


def test_tokenizers_of_other_models_and_files_that_are_none_are_refused(tmp_path):
    model, path = fk.Transformer(SPEC), tmp_path / "tokenizer.json"
    with pytest.raises(fk.CheckpointError, match=r"^tokenizer 'gone' must be a tok"):
        fk.save_huggingface(model, tmp_path / "new", tokenizer="gone")
    vocab = {str(number): number for number in range(17)}
    Tokenizer(WordLevel(vocab, unk_token="0")).save(str(path))
    with pytest.raises(fk.CheckpointError, match=r"^the tokenizer has 17 tokens, but the model"):
        fk.save_huggingface(model, tmp_path / "new", tokenizer=path)
    path.write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    with pytest.raises(fk.CheckpointError, match=r"^no tokenizer can be built from tokenizer\.js"):
        fk.save_huggingface(model, tmp_path / "new", tokenizer=path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_of_other_files_is_not_replaced(saved):
    model = fk.Transformer(SPEC)
    for name in ("notes.txt", "model-1-of-2.safetensors"):
        (saved / name).write_bytes(b"mine")
        with pytest.raises(fk.CheckpointError, match=r"^/.* were not written here .*be deleted"):
            fk.save_huggingface(model, saved)
        assert (saved / name).read_bytes() == b"mine"
        (saved / name).unlink()
    fk.save_huggingface(model, saved)  # in one file, where there were several
    assert [path.name for path in saved.glob("*.safetensors")] == ["model.safetensors"]


def test_a_model_with_more_in_it_is_not_written_and_is_read_into(saved, tmp_path):
    model = fk.Transformer(SPEC, seed=2)
    model.layers[0].extra = torch.nn.Linear(2, 2)
    message = r"^the model has 'layers\.0\.extra\.weight', which has no name on disk\. Pass"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.save_huggingface(model, tmp_path / "new")
    before = model.layers[0].extra.weight.clone()
    fk.load_huggingface(model, saved)  # reading leaves it as it is
    assert torch.equal(model.layers[0].extra.weight, before)
    assert torch.equal(model.output.weight, fk.Transformer(SPEC).output.weight)
    model.layers[0].attention.query = torch.nn.Sequential(model.layers[0].attention.query)
    with pytest.raises(fk.CheckpointError, match=r"has values for 'layers\.0\.attention\.que"):
        fk.load_huggingface(model, saved)


TENSORS = {"a.0.w": torch.ones(4, 3), "a.1.w": torch.ones(4, 3), "b": torch.ones(2)}
BOTH = (rename("a.*.w", "x.*.w"), rename("b", "y"))
TO_X = (rename("a.0.w", "x"), rename("a.1.w", "x"))
RULES = [
    (lambda: BOTH[:1], r"^'b' must match one rule .* matches \[\]\."),
    (lambda: [*BOTH, leave_out("b")], r"^'b' must match one rule .* matches \['b', 'b'\]\."),
    (lambda: [*BOTH, rename("c", "z")], r"^no tensor of the model matches \['c'\]; it has \['a\.0"),
    (lambda: [*TO_X, BOTH[1]], r"^'a\.0\.w' and 'a\.1\.w' are both 'x' on disk\.$"),
    (
        lambda: [split(["a.0.w", "b"], "y"), rename("a.1.w", "z")],
        r"^\{'a\.0\.w': \(4, 3\), 'b': \(2,\)\} do not fill 'y' of shape",
    ),
    (lambda: [stack(join("a.*.w", ["x.*.{}.v", "x.*.{}.w"]))], r"^stack takes the first dimension"),
    (lambda: [BOTH[0], pad(BOTH[1], 3)], r"^'b' has 2 rows, but pad asks for 3"),
    (lambda: [BOTH[0], join("b", list("xyz"))], r"^'b' of shape \(2,\) cannot be split into 3"),
]


def test_name_maps_that_are_not_complete_or_collide_are_refused():
    for rules, message in RULES:
        with pytest.raises(ValueError, match=message):
            NameMap(rules(), TENSORS)


CODE = "from pathlib import Path\nPath(__file__ + '.ran').touch()\nPath('ran').touch()\n"
MAPPED = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"}


@pytest.mark.filterwarnings("ignore")
def test_no_code_of_a_directory_runs(saved, tmp_path, monkeypatch):
    """Not even if somebody at the terminal answers that it may."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (saved / "code.py").write_text(CODE)
    change(saved / "config.json", auto_map=MAPPED)
    fk.load_huggingface(fk.Transformer(fk.huggingface_spec(saved)), saved)
    change(saved / "config.json", model_type="own")
    with pytest.raises(ValueError, match="contains custom code which must be executed"):
        fk.huggingface.transformers_model(saved)
    settings = {"auto_map": {"AutoTokenizer": ["code.Own", None]}, "tokenizer_class": "Own"}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ValueError, match=r"has no tokenizer that transformers can load: .* custom"):
        fk.data.chat_dataset(chats, saved, 16)
    assert not [*tmp_path.rglob("*ran")]
