"""Hugging Face directories that are damaged, of other models, or have what is not had here."""

from __future__ import annotations

import json
import os

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import forgekit as fk
from forgekit.huggingface.names import (
    NameMap,
    cast,
    join,
    leave_out,
    pad,
    rename,
    split,
    stack,
    transpose,
)

pytestmark = pytest.mark.bad_input

SPEC = fk.TransformerSpec(
    vocab_size=16, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=32
)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(tmp_path):
    fk.save_huggingface(fk.Transformer(SPEC), tmp_path / "saved", max_shard_size=4_000)
    return tmp_path / "saved"


def change(path, **changes):
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, **changes}))


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}, **OLD}


OLD = {"rope_scaling": None}
LLAMA3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ONLY = r", and a Transformer has only "
CONFIGS = {
    "biases of attention": ({"attention_bias": True}, rf"attention_bias is True{ONLY}False\."),
    "biases of the feed-forward": ({"mlp_bias": True}, rf"mlp_bias is True{ONLY}False\."),
    "another activation": ({"hidden_act": "gelu"}, rf"hidden_act is 'gelu'{ONLY}'silu'\."),
    "dropped attention": ({"attention_dropout": 0.1}, rf"attention_dropout is 0\.1{ONLY}0\.0\."),
    "latent attention": ({"kv_lora_rank": 8}, rf"kv_lora_rank is 8{ONLY}None\."),
    "latent queries": ({"q_lora_rank": 8}, rf"q_lora_rank is 8{ONLY}None\."),
    "fewer bits": (
        {"quantization_config": {"bits": 4}},
        rf"quantization_config is \{{'bits': 4\}}{ONLY}None\.",
    ),
    "some channels turned": (
        {"partial_rotary_factor": 0.5},
        rf"partial_rotary_factor is 0\.5{ONLY}1\.0\.",
    ),
    "some channels turned, as it is written now": (
        rope("default", partial_rotary_factor=0.5),
        r"partial_rotary_factor is 0\.5; a Transformer turns all channels",
    ),
    "a window": (
        {"sliding_window": 8},
        r"sliding_window is 8 and the context 32, .* huggingface_spec\(directory, max_seq_len=8\)",
    ),
    "a window in words": (
        {"sliding_window": "16"},
        r"sliding_window is '16'; it must be a number or null",
    ),
    "a window of any width": (
        {"sliding_window": True},
        r"sliding_window is True; it must be a number or null",
    ),
    "no wavelengths": ({"rope_theta": 0.0, "rope_parameters": None}, r"rope_theta is 0\.0"),
    "a flag in words": (
        {"tie_word_embeddings": "false"},
        r"tie_word_embeddings is 'false'; it must be true or false",
    ),
    "no heads of keys": ({"num_key_value_heads": 0}, "'kv_heads' must be >= 1: 0"),
    "linear attention": (
        {"layer_types": ["linear_attention", "full_attention"]},
        rf"layer_types has 'linear_attention'{ONLY}'full_attention'\.",
    ),
    "dynamic rope": (
        rope("dynamic", factor=2.0),
        r"rope_type is 'dynamic', which a Transformer does not have; it has linear, llama3, yarn\.",
    ),
    "long rope": (
        rope("longrope", factor=2.0),
        r"rope_type is 'longrope', which a Transformer does not have",
    ),
    "rope of an odd kind": (rope(3), r"rope_type is 3, which a Transformer does not have"),
    "rope of each kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}, **OLD},
        r"rope_parameters has 'full_attention'; one set for all layers is read",
    ),
    "rope in a list": ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
    "rope without its factor": (rope("linear"), r"rope_type 'linear' has no factor"),
    "rope with an odd key": (
        rope("linear", factor=2.0, short_factor=[1.0]),
        r"rope_type 'linear' has short_factor \[1\.0\], which a Transformer's has not",
    ),
    "rope that shortens": (
        rope("linear", factor=0.5),
        r"'factor' must be >= 1: 0\.5",
    ),
    "rope without room between": (
        rope("llama3", **{**LLAMA3, "low_freq_factor": 4.0}),
        r"rope_scaling\.high_freq_factor 4\.0 must be above low_freq_factor 4\.0",
    ),
    "a theta in words": ({"rope_theta": "big"}, r"rope_theta is big and in rope_parameters 10000"),
    "an unknown architecture": (
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
        r"model_type is 'gpt_neox' \(architectures \['GPTNeoXForCausalLM'\]\), which is not known "
        r"here; known are llama, mistral, qwen3, mixtral, qwen3_moe, dots1\.",
    ),
    "no architecture": ({"model_type": None}, r"model_type is None .* known are llama, mistral"),
    "no width": ({"hidden_size": None}, r"config\.json has no hidden_size; it has \["),
    "a width in words": ({"hidden_size": "16"}, r"hidden_size is '16'; it must be an integer"),
    "a broken width": ({"hidden_size": 2.5}, r"hidden_size is 2\.5; it must be an integer"),
    "no layers": ({"num_hidden_layers": 0}, "of a llama model: 'layers' must be >= 1: 0"),
    "odd heads": ({"head_dim": 7}, r"of a llama model: head_dim 7 must be even"),
    "heads that do not share": ({"num_key_value_heads": 3}, r"kv_heads 3 must divide heads 2"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS)
def test_models_that_a_transformer_is_not_are_refused_by_key_and_value(saved, changes, message):
    change(saved / "config.json", **changes)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.huggingface_spec(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "cannot be read: JSONDecodeError: Expecting"),
        ("[1]", "it must be an object"),
    ],
)
def test_what_is_no_configuration_is_refused(saved, content, message):
    (saved / "config.json").unlink()
    if content is not None:
        (saved / "config.json").write_text(content)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.huggingface_spec(saved)


def first(saved):
    return min(saved.glob("*.safetensors"))


def second(saved):
    return sorted(saved.glob("*.safetensors"))[1]


def resave(saved, edit):
    """Change the first file's tensors, and the index with them."""
    tensors = load_file(first(saved))
    edit(tensors)
    listed = json.loads((saved / INDEX).read_text())["weight_map"]
    kept = {name: file for name, file in listed.items() if file != first(saved).name}
    save_file(tensors, first(saved))
    change(saved / INDEX, weight_map={**kept, **dict.fromkeys(tensors, first(saved).name)})


def cut(saved, size):
    with first(saved).open("r+b") as file:
        file.truncate(size)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def reword(saved, old, new):
    content = first(saved).read_bytes()
    assert old in content
    first(saved).write_bytes(content.replace(old, new, 1))


EMBEDDING = "model.embed_tokens.weight"
DAMAGED = "is missing, damaged or was not written to the end: "
FILES = {
    "a file cut short": (lambda saved: cut(saved, first(saved).stat().st_size - 3), DAMAGED),
    "a header cut short": (lambda saved: cut(saved, 40), DAMAGED),
    "an empty file": (lambda saved: cut(saved, 0), DAMAGED),
    "a header that is no JSON": (lambda saved: reword(saved, b'{"', b"{{"), DAMAGED),
    "a shape that is not its bytes": (
        lambda saved: reword(saved, b"[16,16]", b"[16,17]"),
        DAMAGED,
    ),
    "a file that is gone": (
        lambda saved: first(saved).unlink(),
        r"model-00001-of-\d+\.safetensors is missing, .* No such file",
    ),
    "a pipe": (lambda saved: pipe(first(saved)), DAMAGED + "Not a regular file"),
    "a tensor that is gone": (
        lambda saved: resave(saved, lambda tensors: tensors.pop(EMBEDDING)),
        r"does not fit the model: it lacks model\.embed_tokens\.weight\.",
    ),
    "a tensor too many": (
        lambda saved: resave(saved, lambda tensors: tensors.update(vision=torch.ones(2))),
        r"does not fit the model: only it has vision\.",
    ),
    "a bias": (
        lambda saved: resave(
            saved,
            lambda tensors: tensors.update(
                {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}
            ),
        ),
        r"only it has model\.layers\.0\.self_attn\.q_proj\.bias\.",
    ),
    "a tensor of another shape": (
        lambda saved: resave(saved, lambda tensors: tensors.update({EMBEDDING: torch.ones(16, 8)})),
        r"shapes differ: 'model\.embed_tokens\.weight' is \(16, 8\) there and \(16, 16\) here\.",
    ),
    "an index of tensors that are not there": (
        lambda saved: change(
            saved / INDEX,
            weight_map={
                **json.loads((saved / INDEX).read_text())["weight_map"],
                "lm_head.bias": first(saved).name,
            },
        ),
        r"says that 'lm_head\.bias' is in model-00001-of-\d+\.safetensors, and it is in no file",
    ),
    "an index that leaves a tensor out": (
        lambda saved: change(
            saved / INDEX,
            weight_map={
                name: file
                for name, file in json.loads((saved / INDEX).read_text())["weight_map"].items()
                if name != "lm_head.weight"
            },
        ),
        r"says that 'lm_head\.weight' is in no file, and it is in model-0000",
    ),
    "weights in whole numbers": (
        lambda saved: resave(saved, lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.int8)})),
        r"'model\.embed_tokens\.weight' holds int8 and the model's is float32",
    ),
    "no index": (
        lambda saved: (saved / INDEX).unlink(),
        r"has neither model\.safetensors nor model\.safetensors\.index\.json; it has \['config",
    ),
}


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("damage", "message"), FILES.values(), ids=FILES)
def test_damaged_directories_are_refused_and_nothing_is_loaded(saved, damage, message):
    damage(saved)
    model = fk.Transformer(SPEC, seed=7)
    before = bits(model)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.load_huggingface(model, saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(model).items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_none_are_found_while_they_are_read(value, dtype, saved):
    """Not at the first row of metrics, where the data would be blamed."""

    def spoil(tensors):
        tensors[EMBEDDING] = tensors[EMBEDDING].to(dtype)
        tensors[EMBEDDING][7, 3] = value

    resave(saved, spoil)
    with pytest.raises(fk.CheckpointError, match=r"'model\.embed_tokens\.weight' .* not finite"):
        fk.load_huggingface(fk.Transformer(SPEC), saved)


MOE = fk.MoESpec(experts=4, top_k=2, ffn_dim=8, shared=0)
OTHERS = {
    "of another width": ({"dim": 32}, r"is of another model: dim 16 there and 32 here"),
    "of fewer layers": (
        {"layers": 1},
        r"layers 2 there and 1 here\. Build the model with",
    ),
    "of other heads": ({"heads": 4, "head_dim": 4}, r"heads 2 there and 4 here, channels 8 there"),
    "of fewer tokens": ({"vocab_size": 8}, r"vocab_size 16 there and 8 here"),
    "of another norm": ({"norm_eps": 1e-6}, r"norm_eps 1e-05 there and 1e-06 here"),
    "of another base": ({"rope_theta": 7.0}, r"rope_theta 10000\.0 there and 7\.0 here"),
    "with scaling": (
        {"rope_scaling": fk.RopeScaling(kind="linear", factor=2.0)},
        r"rope_scaling None there and \{'kind': 'linear', 'factor': 2\.0",
    ),
    "with tied embeddings": ({"tied": True}, r"tied False there and True here"),
    "with norms of heads": ({"qk_norm": True}, r"qk_norm False there and True here"),
    "with experts": ({"moe": MOE}, r"moe None there and MoESpec\(experts=4"),
}


@pytest.mark.parametrize(("changes", "message"), OTHERS.values(), ids=OTHERS)
def test_directories_of_other_models_are_refused(saved, changes, message):
    with pytest.raises(fk.CheckpointError, match=message):
        fk.load_huggingface(fk.Transformer(attrs.evolve(SPEC, **changes)), saved)


def test_a_trained_head_beside_tied_embeddings_is_refused(saved):
    change(saved / "config.json", tie_word_embeddings=True)
    with pytest.raises(fk.CheckpointError, match=r"lm_head\.weight differs from model\.embed_tok"):
        fk.load_huggingface(fk.Transformer(attrs.evolve(SPEC, tied=True)), saved)


def test_what_cannot_be_loaded_into_is_refused(saved, tmp_path):
    with pytest.raises(TypeError, match=r"^model is a Linear; pass names=NameMap\(rules, model\)"):
        fk.load_huggingface(torch.nn.Linear(2, 2), saved)
    with torch.device("meta"):
        model = fk.Transformer(SPEC)
    with pytest.raises(ValueError, match=r"^'embedding\.weight' is on meta and has no memory"):
        fk.load_huggingface(model, saved)
    with pytest.raises(fk.CheckpointError, match=r"gone is no directory; name one with a config"):
        fk.load_huggingface(fk.Transformer(SPEC), tmp_path / "gone")


EXPORTS = {
    "like nothing that is known": (
        {"like": "gpt2"},
        ValueError,
        r"^like is 'gpt2': no directory, and no family of llama, mistral, qwen3, mixtral, ",
    ),
    "like a number": ({"like": 3}, TypeError, r"^like is 3, a int; pass a family's name"),
    "like a model that is not known": (
        {"like": {"model_type": "gpt2"}},
        fk.CheckpointError,
        r"model_type is 'gpt2' .* known are llama",
    ),
    "like a model with other parts": (
        {"like": "qwen3"},
        fk.CheckpointError,
        r"^Qwen3ForCausalLM is no model of this spec: qk_norm True there and False here\.$",
    ),
    "in whole numbers": (
        {"dtype": torch.int8},
        TypeError,
        r"^dtype is torch\.int8, a dtype; pass a torch\.dtype such as",
    ),
    "in files of nothing": ({"max_shard_size": 0}, ValueError, r"^max_shard_size 0 must be at"),
    "a tokenizer that is not there": (
        {"tokenizer": "gone"},
        fk.CheckpointError,
        r"^tokenizer: gone is no tokenizer\.json, and no folder with one\.$",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), EXPORTS.values(), ids=EXPORTS)
def test_exports_that_cannot_be_are_refused_and_leave_nothing(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        fk.save_huggingface(fk.Transformer(SPEC), tmp_path / "new", **options)
    assert list(tmp_path.iterdir()) == []


SPECS = {
    "a router that no family has": (
        {"moe": attrs.evolve(MOE, router="sigmoid")},
        r"LlamaForCausalLM is no model .* Dots1ForCausalLM is no model of this spec: qk_norm True",
    ),
    "tokens that are dropped": (
        {"moe": attrs.evolve(MOE, capacity=1.0)},
        r"moe\.capacity is 1\.0, and none drops tokens",
    ),
}


@pytest.mark.parametrize(("changes", "message"), SPECS.values(), ids=SPECS)
def test_models_of_no_family_are_refused(tmp_path, changes, message):
    model = fk.Transformer(attrs.evolve(SPEC, **changes))
    with pytest.raises(fk.CheckpointError, match=message):
        fk.save_huggingface(model, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path):
    vocab = {str(number): number for number in range(17)}
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel(vocab, unk_token="0")).save(str(path))
    with pytest.raises(fk.CheckpointError, match=r"^the tokenizer has 17 tokens and the model 16"):
        fk.save_huggingface(fk.Transformer(SPEC), tmp_path / "new", tokenizer=path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"model": {"vocab": {"a": 0}}, "added_tokens": []}', b"\xff\xfe"],
)
def test_a_file_that_no_tokenizer_can_be_built_from_is_refused(content, tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(
        fk.CheckpointError, match=r"^no tokenizer can be built from tokenizer\.json: "
    ):
        fk.save_huggingface(fk.Transformer(SPEC), tmp_path / "new", tokenizer=path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_of_other_files_is_not_replaced(tmp_path):
    model = fk.Transformer(SPEC)
    fk.save_huggingface(model, tmp_path / "new")
    fk.save_huggingface(model, tmp_path / "new")  # what was written here may be
    (tmp_path / "new" / "notes.txt").write_text("mine")
    with pytest.raises(fk.CheckpointError, match=r"holds files that were not written here"):
        fk.save_huggingface(model, tmp_path / "new")
    (tmp_path / "new" / "notes.txt").unlink()
    for name in ("vae.safetensors", "model-1-of-2.safetensors", "adapter_model.safetensors"):
        mine = tmp_path / "new" / name
        mine.write_bytes(b"mine")
        with pytest.raises(fk.CheckpointError, match=r"were not written here .*would be deleted"):
            fk.save_huggingface(model, tmp_path / "new")
        assert mine.read_bytes() == b"mine"
        mine.unlink()
    fk.save_huggingface(model, tmp_path / "new", max_shard_size=4_000)
    fk.save_huggingface(model, tmp_path / "new")  # in one file, where there were several
    assert [path.name for path in (tmp_path / "new").glob("*.safetensors")] == ["model.safetensors"]
    with pytest.raises(TypeError, match=r"^model is a Linear; pass names=NameMap"):
        fk.save_huggingface(torch.nn.Linear(2, 2), tmp_path / "other")


def test_a_model_with_more_in_it_is_not_written_and_is_read_into(tmp_path):
    model = fk.Transformer(SPEC)
    model.layers[0].extra = torch.nn.Linear(2, 2)
    message = r"^the model has 'layers\.0\.extra\.weight', which has no name on disk\. Merge"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.save_huggingface(model, tmp_path / "new")
    before = model.layers[0].extra.weight.clone()
    fk.save_huggingface(fk.Transformer(SPEC, seed=2), tmp_path / "new")
    fk.load_huggingface(model, tmp_path / "new")  # reading leaves it as it is
    assert torch.equal(model.layers[0].extra.weight, before)
    assert torch.equal(model.norm.weight, fk.Transformer(SPEC, seed=2).norm.weight)
    assert torch.equal(model.output.weight, fk.Transformer(SPEC, seed=2).output.weight)
    model.layers[0].attention.query = torch.nn.Sequential(model.layers[0].attention.query)
    with pytest.raises(fk.CheckpointError, match=r"no 'layers\.0\.attention\.query\.weight', and"):
        fk.load_huggingface(model, tmp_path / "new")


TENSORS = {"a.0.w": torch.ones(4, 3), "a.1.w": torch.ones(4, 3), "b": torch.ones(2)}
BOTH = (rename("a.*.w", "x.*.w"), rename("b", "y"))
RULES = {
    "a tensor without a rule": (lambda: BOTH[:1], r"^'b' must match one rule .* match no rule\. "),
    "a tensor with two": (
        lambda: [*BOTH, leave_out("b")],
        r"^'b' must match one rule of the name map, and does match \['b', 'b'\]\. Add narrower",
    ),
    "a rule without a tensor": (
        lambda: [*BOTH, rename("c", "z")],
        r"^\['c'\] match no tensor of the model; it has \['a\.0\.w'",
    ),
    "two tensors of one name": (
        lambda: [BOTH[0], rename("b", "x.1.w")],
        r"^'a\.1\.w' and 'b' are both 'x\.1\.w' on disk, in the same position",
    ),
    "stars on one side": (
        lambda: [rename("a.*.w", "x.w")],
        r"^patterns of a rule must have the same number of \*; they have \{'a\.\*\.w': 1",
    ),
    "nothing to split": (lambda: [split([], "x")], r"^'x' is no tensor of the model's; name at"),
    "a part that is not there": (
        lambda: [split(["b", "c"], "y"), BOTH[0]],
        r"^'b' is joined with \['c'\] on disk, which the model does not have",
    ),
    "parts that do not fit": (
        lambda: [split(["a.0.w", "b"], "y"), rename("a.1.w", "z")],
        r"cannot be joined along dimension 0; the others must be equal",
    ),
    "stacked without a number": (
        lambda: [stack(rename("a.*.w", "x.*.w"))],
        r"^stack: 'x\.\*\.w' needs \{\} once, where the number stands",
    ),
    "a stack of halves": (
        lambda: [stack(join("a.*.w", ["x.*.{}.v", "x.*.{}.w"]))],
        r"^stack takes the first dimension; give join another one, such as dim=1\.$",
    ),
    "thirds of two": (
        lambda: [BOTH[0], join("b", ["b.0", "b.1", "b.2"])],
        r"^'b' of shape \(2,\) cannot be 3 tensors of one size on disk along dimension 0\.$",
    ),
    "halves along what is not there": (
        lambda: [BOTH[0], join("b", ["b.0", "b.1"], dim=1)],
        r"^'b' has shape \(2,\), too few dimensions for its rule",
    ),
    "a vector that is transposed": (
        lambda: [BOTH[0], transpose(BOTH[1])],
        r"^'b' has shape \(2,\), too few dimensions for its rule",
    ),
    "padding that is not there": (
        lambda: [BOTH[0], pad(BOTH[1], 3)],
        r"^'b' has 2 rows and pad asks for 3",
    ),
    "no rows": (lambda: [pad(BOTH[1], 0)], r"^rows 0 must be at least 1"),
}


@pytest.mark.parametrize(("rules", "message"), RULES.values(), ids=RULES)
def test_name_maps_that_are_not_complete_or_collide_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        NameMap(rules(), TENSORS)


def test_a_cast_to_what_is_no_dtype_is_refused():
    with pytest.raises(TypeError, match=r"^dtype is 'float32', a str; pass a torch\.dtype"):
        cast(BOTH[1], "float32")


CODE = "from pathlib import Path\nPath(__file__ + '.ran').touch()\nPath('ran').touch()\n"
MAPPED = {
    "AutoConfig": "code.Own",
    "AutoModelForCausalLM": "code.Own",
    "AutoTokenizer": ["code.Own", None],
}


@pytest.mark.filterwarnings("ignore")
def test_no_code_of_a_directory_runs(saved, tmp_path, monkeypatch):
    """Not even if somebody at the terminal answers that it may."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (saved / "code.py").write_text(CODE)
    change(saved / "config.json", auto_map=MAPPED, model_type="own")
    with pytest.raises(
        fk.CheckpointError, match=r"^transformers cannot build the model of .*saved"
    ):
        fk.run.transformers_model(saved)
    settings = {"auto_map": MAPPED, "tokenizer_class": "Own"}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ValueError, match=r"saved has no tokenizer that transformers can load"):
        fk.data.chat_dataset(chats, saved, 16)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": "two"},
        {"hidden_size": 15},
        {"rope_parameters": 3},
        {"model_type": "llama4_of_tomorrow"},
        {"layer_types": ["none"]},
        {"hidden_act": "no such"},
    ],
    ids=str,
)
def test_what_transformers_refuses_is_one_sentence(changes, saved):
    change(saved / "config.json", **changes)
    with pytest.raises(
        fk.CheckpointError, match=r"^transformers cannot build the model of [^\n]*$"
    ):
        fk.run.transformers_model(saved)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", ["{", "[1]", '{"version": 3}', '{"model": {"type": "no"}}'])
def test_a_tokenizer_that_transformers_refuses_is_one_error(content, saved, tmp_path):
    (saved / "tokenizer.json").write_text(content)
    (saved / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ValueError, match=r"saved has no tokenizer that transformers can load"):
        fk.data.chat_dataset(chats, saved, 16)
