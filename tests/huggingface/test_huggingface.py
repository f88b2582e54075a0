"""Directories of transformers, read into models in any layout, and written as it opens them."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext

import attrs
import pytest
import torch
from covering import some_of
from huggingface_models import (
    DEFAULTS,
    MODELS,
    SIZES,
    load,
    logits_of,
    make_model,
    save_model,
    some_ids,
)
from lab import file_size_limit, full, full_tensors, relative_error
from pool import run_again, run_ranks
from safetensors.torch import load_file, save_file
from saved import assert_same

import forgekit as fk
from forgekit.huggingface import families, save
from forgekit.huggingface.names import (
    NameMap,
    cast,
    leave_out,
    pad,
    rename,
    split,
    stack,
    transpose,
)
from forgekit.model.moe import MoE


def contents(directory):
    """Every tensor of a directory, by the reader of safetensors; the index lists just them."""
    files = {path.name: load_file(path) for path in directory.glob("*.safetensors")}
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    if (path := directory / "model.safetensors.index.json").exists():
        index = json.loads(path.read_text())
        listed = {name: file for file, names in files.items() for name in names}
        assert index["weight_map"] == listed
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def distance(logits, expected):
    return relative_error({"": logits}, {"": expected})


def check_both_ways(kind, folder):
    """Read a model of transformers, write it, and open that in transformers."""
    import transformers

    theirs = save_model(kind, folder / "theirs")
    ours, expected = load(folder / "theirs"), logits_of(theirs, some_ids())
    assert distance(logits_of(ours, some_ids()), expected) < 1e-5
    like = theirs.config.model_type
    fk.save_huggingface(ours, folder / "ours", like=like, max_shard_size=30_000)
    assert len(list((folder / "ours").glob("*.safetensors"))) > 1
    assert_same(contents(folder / "theirs"), contents(folder / "ours"))
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours")
    assert again.config.model_type == like
    assert distance(logits_of(again, some_ids()), expected) < 1e-5
    assert fk.huggingface_spec(folder / "ours") == ours.spec
    experts = [block.experts for block in ours.modules() if isinstance(block, MoE)]
    if experts or ours.spec.rope_scaling is not None:  # neither is a small part of it
        for one in experts:
            one.down.data.zero_()
        ours.spec = attrs.evolve(ours.spec, rope_scaling=None)
        assert distance(logits_of(ours, some_ids()), expected) > 1e-2


@pytest.mark.parametrize("kind", some_of(MODELS, "Llama", "Qwen3 untied", "Llama head_dim"))
def test_a_model_of_transformers_is_read_and_written_with_the_same_logits(kind, tmp_path):
    check_both_ways(kind, tmp_path)


def test_a_dense_family_is_a_row_of_the_table(tmp_path, monkeypatch):
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
    row = families.Family("seed_oss", "SeedOssForCausalLM", defaults=defaults)
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, row))
    check_both_ways("SeedOss", tmp_path)


SMALL = fk.TransformerSpec(
    vocab_size=16, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=32
)
TIED = attrs.evolve(SMALL, tied=True)
LAYOUTS = {
    "fsdp2": ({"dp_shard": 2}, "Llama tied"),
    "tp2": ({"tp": 2, "dp_shard": 1}, "Qwen2 tied"),
    "pp2": ({"pp": 2, "dp_shard": 1}, "Llama llama3"),
    "ep2": ({"ep": 2, "dp_shard": 2}, "Dots1"),
}
LONG = {
    "fsdp4": ({"dp_shard": 4}, "Mixtral"),
    "hsdp2x2": ({"dp_replicate": 2, "dp_shard": 2}, "Mistral"),
    "tp2-fsdp2": ({"tp": 2, "dp_shard": 2}, "Qwen3"),
    "pp2-fsdp2": ({"pp": 2, "dp_shard": 2}, "Qwen2"),
    "pp2-tp2": ({"pp": 2, "tp": 2, "dp_shard": 1}, "Llama head_dim"),
    "cp2-tp2": ({"cp": 2, "tp": 2, "dp_shard": 1}, "Qwen2"),
    "pp2-experts": ({"pp": 2, "dp_shard": 2}, "Dots1"),
    "ep2-fsdp4": ({"ep": 2, "dp_shard": 4}, "Qwen3Moe"),
    "fsdp4-bf16": ({"dp_shard": 4}, "Dots1", "bf16"),  # the masters are written
}


def _round_trip(rank, world, directory, padding, sizes, precision="fp32"):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    spec = fk.huggingface_spec(directory / "theirs")
    plain = fk.Transformer(attrs.evolve(spec, vocab_size=spec.vocab_size + padding))
    fk.load_huggingface(plain, directory / "theirs")
    with torch.device("meta"):
        model = fk.Transformer(plain.spec)
    model = fk.parallelize(model, mesh, precision=precision, seed=3)
    fk.load_huggingface(model, directory / "theirs")
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(full(tensor), expected[name]), name
    theirs = directory / "theirs"
    fk.save_huggingface(model, directory / "ours", like=theirs, max_shard_size=20_000)


@pytest.mark.parametrize("layout", some_of({**LAYOUTS, **LONG}, "fsdp2", *LONG))
def test_a_round_trip_is_bitwise_in_each_layout(layout, tmp_path):
    sizes, kind, *precision = {**LAYOUTS, **LONG}[layout]
    world = 4 if layout in LONG else 2
    save_model(kind, tmp_path / "theirs")
    padding = 1 if "tp" in sizes else 3  # of the vocabulary, which ranks of tp share evenly
    run_again(_round_trip, world, tmp_path, padding, sizes, *precision)
    assert_same(contents(tmp_path / "theirs"), contents(tmp_path / "ours"))
    assert fk.huggingface_spec(tmp_path / "ours") == fk.huggingface_spec(tmp_path / "theirs")


def test_an_export_in_16_bits_keeps_what_has_to_be_float32(tmp_path):
    save_model("Dots1", tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    fk.save_huggingface(model, tmp_path / "ours", dtype=torch.bfloat16)
    expected = contents(tmp_path / "theirs")
    for name, tensor in contents(tmp_path / "ours").items():
        is_bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_bias else torch.bfloat16)
        assert torch.equal(tensor, expected[name].to(tensor.dtype))
    facts = {"model_type": "dots1", "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert config_of(tmp_path / "ours").items() >= facts.items()


NEEDED = {"n_routed_experts", "num_experts_per_tok"}
"""Of dots1: its class has no number for them, and no model without them."""


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_key_that_is_left_out_has_the_value_of_the_configuration_class(kind, tmp_path):
    import transformers

    heads = {"num_attention_heads": 64, "hidden_size": 256, "tie_word_embeddings": True}
    options = SIZES | MODELS[kind] | heads | {"sliding_window": None}
    theirs = getattr(transformers, f"{kind.split()[0]}Config")(**options)
    theirs.save_pretrained(tmp_path)
    whole = config_of(tmp_path)
    for key in whole.keys() - {"model_type"}:
        gone = {key, "layer_types"} if key == "num_hidden_layers" else {key}
        write(tmp_path / "config.json", {k: v for k, v in whole.items() if k not in gone})
        if kind == "Dots1 groups" and key in NEEDED:
            with pytest.raises(fk.CheckpointError, match=r"config\.json of .*: KeyError: 'num_"):
                fk.huggingface_spec(tmp_path)
            continue
        spec = fk.huggingface_spec(tmp_path)
        filled_in = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert spec == families.family_of(filled_in).read(filled_in), key


def test_biases_are_those_of_a_family_and_no_key_says_so(tmp_path):
    """A Llama that has them has one behind its attention too."""
    save_model("Qwen2", tmp_path / "base")
    update(tmp_path / "base" / "config.json", attention_bias=True)
    model = load(tmp_path / "base")
    assert model.spec.qkv_bias
    fk.save_huggingface(model, tmp_path / "ours")
    assert config_of(tmp_path / "ours")["model_type"] == "qwen2"
    assert "attention_bias" not in config_of(tmp_path / "ours")


SCALINGS = [
    None,
    fk.RopeScaling(kind="linear", factor=2.0),
    fk.RopeScaling(kind="yarn", factor=2.0, original_max_seq_len=16),
]


@pytest.mark.parametrize("gone", [["rope_parameters"], ["rope_theta", "rope_scaling"]])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_both_spellings_of_rope_are_written_and_each_is_read(scaling, gone):
    spec = attrs.evolve(SMALL, rope_theta=500.0, rope_scaling=scaling)
    config = families.FAMILIES[0].write(spec)
    kept = {key: value for key, value in config.items() if key not in gone}
    assert families.compare_specs(families.FAMILIES[0].read(kept), spec) == []


def test_all_that_a_directory_says_beside_its_weights_is_kept(tmp_path):
    import transformers

    theirs = make_model("Llama", eos_token_id=[1, 2], bos_token_id=0, pad_token_id=3)
    theirs.generation_config.update(eos_token_id=[1, 2], temperature=0.3, do_sample=True)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs", vocab_size=40)
    for table in (model.embedding.weight.data, model.output.weight.data):
        assert table[31:].eq(0).all()
        table[31:] = 3.0
    fk.save_huggingface(model, tmp_path / "ours", like=tmp_path / "theirs")
    assert_same(contents(tmp_path / "theirs"), contents(tmp_path / "ours"))  # without the padding
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = {"eos_token_id": [1, 2], "bos_token_id": 0, "pad_token_id": 3, "vocab_size": 31}
    assert again.config.to_dict().items() >= ids.items()
    assert again.generation_config.eos_token_id == [1, 2]
    assert again.generation_config.temperature == 0.3


def test_a_tokenizer_of_ones_own_gives_the_token_that_ends_a_text(tmp_path):
    import transformers

    from forgekit.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["to be or not to be"] * 2, vocab_size=264)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    model = fk.Transformer(attrs.evolve(SMALL, vocab_size=size + 3))
    for number, given in enumerate((tokenizer, tmp_path / "tokenizer.json")):
        ours = tmp_path / str(number)
        like = {"model_type": "llama", "vocab_size": 100, "eos_token_id": 2}
        like |= {"quantization_config": {"quant_method": "gptq"}}  # of weights that are not these
        fk.save_huggingface(model, ours, given, like=like)
        again = transformers.AutoTokenizer.from_pretrained(ours)
        assert (again.eos_token, again.eos_token_id) == ("<|endoftext|>", 0)
        assert again("to be")["input_ids"] == tokenizer.encode("to be").ids
        # A Llama's token that begins a text would be 1; what is above the vocabulary is padding.
        ids = {"eos_token_id": 0, "bos_token_id": None, "vocab_size": size}
        assert config_of(ours).items() >= ids.items()
        assert "quantization_config" not in config_of(ours)


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text))


def update(path, **changes):
    write(path, json.loads(path.read_text()) | changes)


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MANY = {"default": CHAT, "tool_use": "TOOLS" + CHAT, "rag": "RAG" + CHAT}
CODE = {"model.py", "tokens.py"}
CLASSES = {"AutoTokenizer": ["tokens.Own", None]}
ROOM = {
    "tokens.py": "raise SystemExit\n",
    "model.py": "raise SystemExit\n",
}
ROOM |= {"preprocessor_config.json": {"size": 3}, "processor_config.json": {}}
ROOM |= {"chat_template.json": {"chat_template": "OLD"}, "added_tokens.json": {"</s>": 1}}
ROOM |= {"spiece.model": "s", "tokenizer.model.v3": "t", "vocab.txt": "a", "qwen.tiktoken": "t"}


def test_whatever_is_read_beside_the_weights_is_in_an_export(tmp_path):
    """All chat templates, and files of other tokenizers and processors; no code that they name."""
    import tokenizers
    import transformers

    base, tokens = tmp_path / "base", {"bos_token": "<s>", "eos_token": "</s>"}
    save_model("Llama", base)
    model = load(base)
    words = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a")
    words = {"tokenizer_object": tokenizers.Tokenizer(words), "chat_template": MANY}
    transformers.PreTrainedTokenizerFast(**words, **tokens).save_pretrained(base)
    update(base / "tokenizer_config.json", chat_template="KEY")  # the file counts, not the key
    expected = transformers.AutoTokenizer.from_pretrained(base)
    assert expected.chat_template == MANY
    for name, text in ROOM.items():
        write(base / name, text)
    update(base / "tokenizer_config.json", auto_map=CLASSES)
    classes = {"AutoModelForCausalLM": "model.Own"}  # a model is written as transformers' own
    update(base / "config.json", auto_map=classes, transformers_weights="other.safetensors")
    write(base / "notes.txt", "mine")
    ways = {"like": (None, base), "tokenizer": (base, "llama"), "object": (expected, base)}
    for way, (tokenizer, like) in ways.items():
        for _ in range(2):  # the second one replaces the first
            fk.save_huggingface(model, tmp_path / way, tokenizer, like)
        kept = {name for name in ROOM if (tmp_path / way / name).exists()}
        processors = {"preprocessor_config.json", "processor_config.json"}
        assert kept == (processors if way == "object" else ROOM.keys() - CODE), way
        assert not (tmp_path / way / "notes.txt").exists()
        assert not {"auto_map", "transformers_weights"} & config_of(tmp_path / way).keys()
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / way)
        assert torch.equal(opened.lm_head.weight, model.output.weight)
        settings = json.loads((tmp_path / way / "tokenizer_config.json").read_text())
        assert settings.pop("auto_map", None) == (None if way == "object" else CLASSES)
        write(tmp_path / way / "tokenizer_config.json", settings)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / way)
        assert again.chat_template == MANY
        assert again.get_vocab() == expected.get_vocab()
        assert again.special_tokens_map == expected.special_tokens_map


def leave_index(base, other):
    for path in other.glob("model*"):
        shutil.copy(path, base)
    shutil.copy(path, base / "optimizer.safetensors")


def named(name):
    """The configuration names a file, or an index, and another model has the usual name."""

    def change(base, other):
        shutil.copy(base / "model.safetensors", base / "named.safetensors")
        leave_index(base, other)
        tensors = load_file(base / "model.safetensors")
        save_file({key: -tensor for key, tensor in tensors.items()}, base / "model.safetensors")
        update(base / "config.json", transformers_weights=name)

    return change


def no_weights(base, other):
    (base / "model.safetensors").rename(base / "model.fp16.safetensors")


def no_list(base, other):
    (base / "model.safetensors").unlink()
    write(base / SHARDS, {"metadata": {}})


SHARDS = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
ROOMS = {
    "an index and shards of another save, and files of other programs": (leave_index, None),
    "an index that was cut short": (lambda base, other: write(base / SHARDS, "{"), None),
    "a file that the configuration names": (named("named.safetensors"), None),
    "an index that the configuration names": (named(SHARDS), None),
    "a variant alone": (no_weights, r"has neither model\.safetensors nor .*'model\.fp16\.saf"),
    "an index without a list": (no_list, "KeyError: 'weight_map'"),
    "a name of no file": (named("gone.safetensors"), r"has neither gone\.safetensors; it has"),
    "an adapter": (
        lambda base, other: write(base / ADAPTER, {}),
        r"has an adapter_config\.json beside its weights, so transformers adds an adapter to them",
    ),
}


@pytest.mark.parametrize(("change", "message"), ROOMS.values(), ids=ROOMS)
def test_the_weights_are_those_that_transformers_reads(change, message, tmp_path):
    """Whatever else lies in the directory: they are read, or the directory is refused."""
    import transformers

    base, other = tmp_path / "base", tmp_path / "other"
    theirs = save_model("Llama", base, max_shard_size="1GB")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(-3)
    theirs.save_pretrained(other, max_shard_size="30KB")
    change(base, other)
    if message is None:
        opened = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
        assert distance(logits_of(load(base), some_ids()), logits_of(opened, some_ids())) < 1e-5
    else:
        with pytest.raises(fk.CheckpointError, match=message):
            load(base)
    if "adapter" in str(message):  # one that is loaded next
        tuned = fk.add_lora(fk.Transformer(fk.huggingface_spec(base)), rank=2)
        fk.load_huggingface(tuned, base)


def test_a_head_beside_tied_embeddings_that_equals_them_is_left_out(tmp_path):
    fk.save_huggingface(model := fk.Transformer(TIED), tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as old ones have
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert_same(full_tensors(load(tmp_path / "a")), full_tensors(model))


class Own(torch.nn.Module):
    """Queries, keys and values in one on disk, transposed; experts in one each."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.ModuleDict() for _ in range(2))
        for block in self.blocks:
            for name, size in (("query", 6), ("key", 2), ("value", 4)):
                block[name] = torch.nn.Linear(5, size, bias=False)
            block["scale"] = torch.nn.RMSNorm(5)
        self.experts = torch.nn.Parameter(torch.randn(3, 8, 5))
        self.up = torch.nn.Parameter(torch.randn(3, 8, 5))
        self.table = torch.nn.Parameter(torch.randn(7, 5))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("left", torch.ones(2))


def own_rules():
    joined = [f"blocks.*.{name}.weight" for name in ("query", "key", "value")]
    return [
        transpose(split(joined, "h.*.qkv")),
        cast(rename("blocks.*.scale.weight", "h.*.scale"), torch.float64),
        transpose(stack(split(["experts", "up"], "moe.{}.both", dim=1))),
        pad(rename("table", "table"), 6),
        rename("steps", "steps"),
        leave_out("left"),
    ]


def test_a_model_of_ones_own_is_written_and_read_by_rules(tmp_path):
    torch.manual_seed(1)
    model = Own()
    names = NameMap(own_rules(), model)
    fk.save_huggingface(model, tmp_path / "own", names=names, like={"model_type": "own", "x": 5})
    found = contents(tmp_path / "own")
    for number, block in enumerate(model.blocks):
        parts = [block[name].weight for name in ("query", "key", "value")]
        assert torch.equal(found.pop(f"h.{number}.qkv"), torch.cat(parts).T)
        assert found.pop(f"h.{number}.scale").dtype == torch.float64
    for number in range(3):
        both = torch.cat([model.experts[number], model.up[number]]).T
        assert torch.equal(found.pop(f"moe.{number}.both"), both)
    assert torch.equal(found.pop("table"), model.table[:6])
    assert found == {"steps": 3}
    assert config_of(tmp_path / "own")["x"] == 5
    other = Own()
    other.left.zero_()
    fk.load_huggingface(other, tmp_path / "own", names=names)
    model.table.data[6] = 0
    model.left.zero_()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    del model.table
    with pytest.raises(fk.CheckpointError, match=r"no rank has all of \['table'\], 'table' on"):
        fk.save_huggingface(model, tmp_path / "less", names=names, like={"model_type": "own"})


def test_an_export_that_differs_leaves_nothing(tmp_path, monkeypatch):
    write = save.write_tensors

    def damaged(path, entries, tensors):
        write(path, entries, (t.neg() if t.ndim == 1 else t for t in tensors))

    monkeypatch.setattr(save, "write_tensors", damaged)
    with pytest.raises(fk.CheckpointError, match=r"layernorm\.weight' on disk has values that"):
        fk.save_huggingface(fk.Transformer(SMALL), tmp_path / "ours")
    assert not list(tmp_path.iterdir())


def _refuse(rank, world, directory):
    """What is damaged for one rank is loaded by none; where one disk is full, nothing is left."""
    mesh = fk.build_mesh(fk.MeshSpec(pp=2, dp_shard=1), device="cpu")
    model = fk.parallelize(fk.Transformer(SMALL, seed=3), mesh)
    before = full_tensors(model)
    with pytest.raises(fk.CheckpointError, match="damaged or incomplete"):
        fk.load_huggingface(model, directory / "damaged")
    assert_same(full_tensors(model), before)
    limit = nullcontext() if rank else file_size_limit(10_000)
    with limit, pytest.raises(fk.CheckpointError, match="File too large"):
        fk.save_huggingface(model, directory / "full")


def test_what_fails_on_one_rank_fails_on_all_and_leaves_all_as_it_was(tmp_path):
    fk.save_huggingface(fk.Transformer(SMALL), tmp_path / "damaged", max_shard_size=4_000)
    last = max((tmp_path / "damaged").glob("*.safetensors"))
    os.truncate(last, last.stat().st_size - 1)
    run_ranks(_refuse, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


# DoRA


LEARNED = "layers.0.attention.query.lora_"


def _load_with_lengths(rank, world, directory, sizes):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    with torch.device("meta"):
        model = fk.Transformer(fk.huggingface_spec(directory))
        fk.add_lora(model, rank=2, dora=True, targets=("*.query", "*.down"))
    model = fk.parallelize(model, mesh)
    with torch.no_grad():  # an adapter that has learned keeps its lengths
        for name, parameter in model.named_parameters():
            if "magnitude" in name or name == f"{LEARNED}B":
                parameter.fill_(0.7)
    fk.load_huggingface(model, directory)
    return {n: full(p).detach() for n, p in model.named_parameters() if "magnitude" in n}


@pytest.mark.parametrize("dimension", some_of(["dp_shard", "tp", "pp"], "dp_shard", "pp"))
def test_lengths_of_rows_are_those_of_the_whole_weights_that_were_read(dimension, tmp_path):
    save_model("Llama", tmp_path, vocab_size=32)
    weights = dict(load(tmp_path).named_parameters())
    held = run_again(_load_with_lengths, 2, tmp_path, {"dp_shard": 1, dimension: 2})
    found = {name: lengths for one in held for name, lengths in one.items()}
    assert bool((found.pop(f"{LEARNED}magnitude_vector") == 0.7).all())
    assert len(found) == 5
    for name, lengths in found.items():
        weight = weights[name.replace("lora_magnitude_vector", "weight")]
        assert torch.equal(lengths, weight.norm(dim=1)), name
