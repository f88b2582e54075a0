"""Adapters in the layout of peft, both ways: peft and transformers are the oracles."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path

import adapted
import attrs
import pytest
import torch
from adapted import build, move
from oracle import full
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn

import forgekit as fk

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers
SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
    "initializer_range": 0.2,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
IDS = torch.arange(24).reshape(2, 12) % 31


def theirs(kind, tied=False):
    import transformers

    name = "Qwen3Moe" if kind == "experts" else "Qwen3"
    sizes = SIZES | (EXPERTS if kind == "experts" else {}) | {"tie_word_embeddings": tied}
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def ours(other, folder, tied=False, adapters=()):
    """Our model of the same weights; untied it gets a copy of a tied embedding.

    Adapters are added before the weights are loaded.
    """
    other.save_pretrained(folder)
    spec = fk.huggingface_spec(folder)
    model = fk.Transformer(spec).eval()
    for options in adapters:
        fk.add_lora(model, **options)
    fk.load_huggingface(model, folder)
    if tied or not spec.tied:
        return model
    untied = fk.Transformer(attrs.evolve(spec, tied=False)).eval()
    untied.load_state_dict({**model.state_dict(), "output.weight": model.embedding.weight})
    return untied


OURS = {
    "dense": (
        "dense",
        [
            {
                "rank": 4,
                "alpha": 16.0,
                "targets": ("*.query", "*.value", "*.down", "output"),
                "rank_pattern": {"layers.1.*": 3},
                "alpha_pattern": {"*.value": 20.0},
            }
        ],
    ),
    "lengths": (
        "dense",
        [{"rank": 4, "alpha": 16.0, "targets": ("*.query", "*.up"), "dora": True}],
    ),
    "roots": ("dense", [{"rank": 4, "alpha": 16.0, "targets": ("*.gate",), "rslora": True}]),
    "experts": (
        "experts",
        [
            {"rank": 3, "alpha": 12.0, "targets": ("*.experts", "*.key")},
        ],
    ),
    "experts of other ranks": (
        "experts",
        [
            {
                "rank": 2,
                "alpha": 8.0,
                "targets": ("*.experts",),
                "rank_pattern": {"*.up": 3},
                "alpha_pattern": {"*.up": 12.0, "*.down": 6.0},
            },
        ],
    ),
    "one stack of experts": ("experts", [{"rank": 2, "alpha": 8.0, "targets": ("*.experts.up",)}]),
    "the other stack": ("experts", [{"rank": 2, "alpha": 8.0, "targets": ("*.experts.down",)}]),
}


@pytest.mark.parametrize("case", OURS.values(), ids=OURS.keys())
def test_peft_opens_our_adapter_and_so_do_we(case, tmp_path):
    import peft

    kind, adapters = case
    other = theirs(kind)
    model = ours(other, tmp_path / "base")
    for options in adapters:
        fk.add_lora(model, **options)
    expected = move(model)(IDS)
    fk.save_adapter(model, tmp_path / "adapter", base="somewhere")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somewhere"
    opened = peft.PeftModel.from_pretrained(other, tmp_path / "adapter").eval()
    found = opened(IDS).logits
    assert (found - ours(theirs(kind), tmp_path / "again")(IDS)).abs().max() > 0.1
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    assert relative(found, expected) < 1e-5
    again = ours(theirs(kind), tmp_path / "again")
    fk.load_adapter(again, tmp_path / "adapter")
    assert same(again, model)
    held = ours(theirs(kind), tmp_path / "again", adapters=adapters)
    fk.load_adapter(held, tmp_path / "adapter")
    assert same(held, model)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def same(one, other):
    named = dict(one.named_parameters())
    return named.keys() == dict(other.named_parameters()).keys() and all(
        torch.equal(full(named[n]), full(p)) for n, p in other.named_parameters()
    )


THEIRS = {
    "dense": (
        "dense",
        False,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"],
            "rank_pattern": {"v_proj": 3, r"layers\.1\.self_attn\.q_proj": 5},
            "alpha_pattern": {"down_proj": 24},
        },
    ),
    "lengths": ("dense", False, {"target_modules": ["k_proj", "up_proj"], "use_dora": True}),
    "roots": ("dense", False, {"target_modules": ["o_proj"], "use_rslora": True}),
    "the head of a tied model": ("dense", True, {"target_modules": ["lm_head", "q_proj"]}),
    "experts, rewritten": (
        "experts",
        False,
        {"target_modules": ["gate_proj", "up_proj", "down_proj", "k_proj"]},
    ),
    "experts": (
        "experts",
        False,
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "gate and up": (
        "experts",
        False,
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj"],
            "rank_pattern": {r"experts\.gate_up_proj": 3},
        },
    ),
    "down": (
        "experts",
        False,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("case", THEIRS.values(), ids=THEIRS.keys())
def test_we_open_an_adapter_of_peft(case, tmp_path):
    import peft

    kind, tied, options = case
    other = theirs(kind, tied)
    model = ours(other, tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options)
    wrapped = peft.get_peft_model(other, config).eval()
    move(wrapped)
    expected = wrapped(IDS).logits
    wrapped.save_pretrained(tmp_path / "adapter")
    before = model(IDS)
    fk.load_adapter(model, tmp_path / "adapter")
    found = model(IDS)
    assert relative(found, before) > 0.01
    assert relative(found, expected) < 1e-5
    fk.merge_lora(model)
    assert relative(model(IDS), expected) < 1e-5
    if tied:
        with pytest.raises(
            fk.CheckpointError, match=r"'lm_head', which this model does not have; of a tied"
        ):
            fk.load_adapter(
                ours(theirs(kind, True), tmp_path / "again", True), tmp_path / "adapter"
            )


LAYOUTS = (
    ("plain", {"dp_shard": 1, "tp": 2}),
    ("lengths", {"dp_shard": 1, "tp": 2}),
    ("plain", {"dp_shard": 1, "pp": 2}),
    ("lengths", {"dp_shard": 2}),
    ("experts", {"dp_shard": 2}),
    ("experts", {"dp_shard": 2, "ep": 2}),
    ("experts", {"dp_shard": 1, "tp": 2}),
)
WIDER = (
    ("uneven", {"dp_shard": 4, "ep": 4}),
    ("uneven", {"dp_shard": 2, "ep": 2, "tp": 2}),
    ("experts", {"dp_shard": 4, "ep": 2}),
    ("experts", {"dp_shard": 1, "tp": 2, "pp": 2}),
)


def move_through(rank, world, folder, layouts):
    """Save and load in each layout; files are those of one process, and values come back."""
    found = []
    for number, (kind, sizes) in enumerate(layouts):
        mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
        model = fk.parallelize(move(build(kind)), mesh)
        fk.save_adapter(model, folder / str(number))
        other = fk.parallelize(build(kind), mesh)
        fk.load_adapter(other, folder / kind)
        found.append(same(other, model))
        if rank == 0:
            own, alone = (
                load_file(folder / name / "adapter_model.safetensors")
                for name in (str(number), kind)
            )
            found.append(own.keys() == alone.keys())
            found.append(all(torch.equal(own[name], alone[name]) for name in own))
            configs = [
                (folder / name / "adapter_config.json").read_text() for name in (str(number), kind)
            ]
            read = [json.loads(text) for text in configs]
            found.append(
                {k: sorted(v) if isinstance(v, list) else v for k, v in read[0].items()}
                == {k: sorted(v) if isinstance(v, list) else v for k, v in read[1].items()}
            )
    return found


def check_files(layouts, world, folder):
    for kind in {kind for kind, _ in layouts}:
        fk.save_adapter(move(build(kind)), folder / kind)
    assert all(all(found) for found in run_ranks(move_through, world, folder, layouts))


def test_every_layout_writes_the_files_of_one_process_and_reads_them(tmp_path):
    check_files(LAYOUTS, 2, tmp_path)


@pytest.mark.oracle
def test_more_layouts_write_the_files_of_one_process_and_read_them(tmp_path):
    check_files(WIDER, 4, tmp_path)


def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch):
    model = move(build("plain"))
    fk.save_adapter(model, tmp_path / "adapter")
    before = {p.name: p.read_bytes() for p in (tmp_path / "adapter").iterdir()}

    def fail(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(fk.CheckpointError, match="no space left"):
        fk.save_adapter(build("plain"), tmp_path / "adapter")
    assert {p.name: p.read_bytes() for p in (tmp_path / "adapter").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_foreign_model_keeps_its_own_names(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    saved = move(fk.add_lora(model, rank=2, alpha=8.0, targets=("0", "2")))
    fk.save_adapter(saved, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.0.lora_A.weight" in names
    again = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for name in ("0", "2"):
            again.get_submodule(name).weight.copy_(saved.get_submodule(name).weight)
            again.get_submodule(name).bias.copy_(saved.get_submodule(name).bias)
    fk.load_adapter(again, tmp_path / "adapter")
    assert same(again, saved)


def plain(**changes):
    return fk.Transformer(attrs.evolve(adapted.SPEC, **changes))


def in_file(folder, change):
    """Change the tensors of a file."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def in_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def rename(tensors):
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 32)


def trained(**options):
    model = fk.add_lora(plain(), **options)
    model.norm.weight.requires_grad_(True)
    return model


INITS = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", "another")
LOADED = {
    "another width": (None, lambda: plain(dim=48), r"need \{'A\': \(\d, 48\)"),
    "fewer layers": (
        None,
        lambda: plain(layers=1),
        r"'model\.layers\.1\.[\w.]+', which this model does not have",
    ),
    "an unknown layer": (
        lambda folder: in_file(folder, rename),
        plain,
        r"model\.layers\.7\.self_attn\.q_proj', which this model does not have",
    ),
    "a lost factor": (
        lambda folder: in_file(folder, lambda t: t.pop(sorted(t)[0])),
        plain,
        r"has \{'B': ",
    ),
    "a name of another method": (
        lambda folder: in_file(folder, lambda t: t.update({"model.x.vera_lambda": torch.ones(1)})),
        plain,
        r"holds 'model\.x\.vera_lambda'; names are base_model\.model\.",
    ),
    "another rank than the file's": (
        lambda folder: in_config(folder, r=7),
        plain,
        r"this model and the config's ranks need",
    ),
    "a cut file": (cut, plain, "is damaged or no safetensors file"),
    "another method": (
        lambda folder: in_config(folder, peft_type="VERA"),
        plain,
        "the peft_type 'VERA'",
    ),
    "trained modules": (
        lambda folder: in_config(folder, modules_to_save=["lm_head"]),
        plain,
        r"modules_to_save=\['lm_head'\]",
    ),
    "trained biases": (
        lambda folder: in_config(folder, bias="all"),
        plain,
        "bias='all', which has no counterpart",
    ),
    "no rank": (
        lambda folder: in_config(folder, r=None),
        plain,
        r"has r=None; it must be an integer",
    ),
    **{
        f"{key} {value!r}": (partial(in_config, **{key: value}), plain, why)
        for key, value, why in (
            *(("init_lora_weights", name, "of another base") for name in INITS),
            ("layer_replication", [[0, 2]], r"layer_replication=\[\[0, 2\]\], which has"),
            ("kasa_config", {"beta": 1}, r"kasa_config=.*no counterpart here"),
            ("r", 0, r"has r=0; it must be an integer above 0"),
            ("r", True, r"has r=True; it must be an integer above 0"),
            ("r", 2.5, r"has r=2\.5; it must be an integer above 0"),
            ("lora_alpha", "16", r"has lora_alpha='16'; it must be a number"),
            ("rank_pattern", {"*.q": 4}, r"'\*\.q' that is no regular expression"),
            ("rank_pattern", ["q_proj"], r"rank_pattern=\['q_proj'\]; it must be a dict"),
            ("rank_pattern", {"q_proj": 0}, r"has q_proj=0; it must be an integer above 0"),
            ("alpha_pattern", {"q_proj": "a"}, r"has q_proj='a'; it must be a number"),
            ("target_parameters", 3, r"target_parameters=3; it must be a list"),
            ("lora_dropout", "much", r"has lora_dropout='much'; it must be a number"),
        )
    },
    "a value that is none": (
        lambda folder: in_file(folder, lambda t: t[sorted(t)[0]].flatten()[:1].fill_(math.nan)),
        plain,
        r"holds values that are not finite",
    ),
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        plain,
        "adapter_config.json is no JSON",
    ),
    "other matrices": (
        None,
        lambda: fk.add_lora(plain(), rank=4, alpha=16.0, targets="*.query"),
        r"has adapters of .*which have none in the model",
    ),
    "more matrices": (
        None,
        lambda: fk.add_lora(build("plain"), targets="*.value"),
        r'lacks "layers\.0\.attention\.value", "layers\.1\.attention\.value", which have',
    ),
    "another scale": (
        None,
        lambda: fk.add_lora(
            fk.add_lora(plain(), **adapted.DENSE[0] | {"alpha": 12.0}), **adapted.DENSE[2]
        ),
        r"has rank \d, scale \S+ and dora=False for '.*'; the model has rank \d, scale",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("change", "model", "message"), LOADED.values(), ids=LOADED.keys())
def test_an_adapter_for_another_base_is_refused_and_nothing_is_changed(
    change, model, message, tmp_path
):
    folder = tmp_path / "adapter"
    fk.save_adapter(move(build("plain")), folder)
    if change is not None:
        change(folder)
    target = model()
    before = {n: p.detach().clone() for n, p in target.named_parameters()}
    with pytest.raises(fk.CheckpointError, match=message):
        fk.load_adapter(target, folder)
    assert {n: p.shape for n, p in target.named_parameters()} == {
        n: p.shape for n, p in before.items()
    }
    assert all(torch.equal(p, before[n]) for n, p in target.named_parameters())


def merged():
    model = build("plain")
    fk.merge_lora(model)
    return model


def apart():
    return fk.add_lora(
        fk.Transformer(adapted.EXPERTS),
        targets="*.experts",
        rank_pattern={"*.gate": 4},
    )


SAVED = {
    "no adapter": (plain, "Transformer has no adapter to save"),
    "trained parameters": (partial(trained, rank=4), r"1 trained parameters .*'norm\.weight'"),
    "merged": (merged, "the file is for a base without them"),
    "some with lengths": (partial(build, "dense"), r"has DoRA and '.*' has not"),
    "gate and up apart": (apart, r"gate and up of '.*experts' have the scales"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("model", "message"), SAVED.values(), ids=SAVED.keys())
def test_what_a_file_could_not_say_is_not_saved(model, message, tmp_path):
    with pytest.raises((ValueError, fk.CheckpointError), match=message):
        fk.save_adapter(model(), tmp_path / "adapter")
    assert not any(tmp_path.iterdir())


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_an_adapter_is_no_file_to_wait_for(name, tmp_path):
    fk.save_adapter(build("plain"), tmp_path / "adapter")
    (tmp_path / "adapter" / name).unlink()
    os.mkfifo(tmp_path / "adapter" / name)
    with pytest.raises(fk.CheckpointError, match=name):
        fk.load_adapter(plain(), tmp_path / "adapter")


def test_directories_of_others_are_refused(tmp_path):
    fk.save_adapter(build("plain"), tmp_path / "adapter")
    for name in ("notes.txt", "README.md"):
        (tmp_path / "adapter" / name).write_text("mine")
        with pytest.raises(fk.CheckpointError, match=name):
            fk.save_adapter(build("plain"), tmp_path / "adapter")
        (tmp_path / "adapter" / name).unlink()
    fk.save_adapter(build("plain"), tmp_path / "adapter")
    with pytest.raises(fk.CheckpointError, match=r"adapter_config\.json"):
        fk.load_adapter(plain(), Path(tmp_path))


def test_an_export_takes_what_is_merged_and_refuses_what_is_not(tmp_path):
    model = fk.Transformer(adapted.SPEC, seed=0)
    fk.add_lora(model, targets=("*.query", "*.down"), rank=2, dora=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    ids = torch.arange(12).reshape(2, 6)
    wanted = model(ids)
    with pytest.raises(fk.CheckpointError, match=r"has an adapter that is not merged into its"):
        fk.save_huggingface(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    fk.merge_lora(model)
    fk.save_huggingface(model, tmp_path / "out")
    plain = fk.Transformer(fk.huggingface_spec(tmp_path / "out"))
    fk.load_huggingface(plain, tmp_path / "out")
    torch.testing.assert_close(plain(ids), wanted, rtol=1e-4, atol=1e-5)
    assert (plain(ids) - fk.Transformer(adapted.SPEC, seed=0)(ids)).abs().max() > 0.01
