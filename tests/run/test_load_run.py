"""A run as a script gets it that samples or evaluates, and as ``forgekit export`` writes it."""

from __future__ import annotations

import json

import attrs
import pytest
import torch
from huggingface_models import load, logits_of, save_model

import forgekit as fk
from forgekit.cli import main
from forgekit.config import to_dict
from forgekit.data.tokenizer import train_tokenizer

SPEC = fk.TransformerSpec(
    vocab_size=264, dim=128, layers=2, heads=2, kv_heads=1, ffn_dim=128, max_seq_len=32,
    rope_theta=77.0, rope_scaling=fk.RopeScaling(kind="linear", factor=2.0), dropout=0.3,
)  # fmt: skip
PLAIN = attrs.evolve(SPEC, dim=16, ffn_dim=24, rope_scaling=None)
MOE = attrs.evolve(SPEC, dim=16, ffn_dim=24, moe=fk.MoESpec(experts=4, top_k=2, ffn_dim=8))
IDS = torch.arange(20).reshape(2, 10)
TOKENIZER = train_tokenizer(["to be or not to be"] * 2, 264)


@attrs.define(slots=True, eq=False, kw_only=True)
class Own(fk.TrainState):
    """A state with a field of its own."""

    seen: int = 0


def keep(model, folder, config, step=3):
    """Save a run as a recipe leaves it, after its weights have moved."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.02 * step)
    state = Own.create(model, fk.adamw(model), average=fk.EMA(0.5), seen=4)
    fk.checkpoint_save(fk.donate(state, step=step), folder / "checkpoints", blocking=True)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return logits_of(model.eval(), IDS)


@pytest.mark.parametrize("spec", [attrs.evolve(SPEC, tied=True), MOE], ids=["tied", "moe"])
def test_a_run_computes_what_it_did(spec, tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    config = {"model": to_dict(spec), "data": {"path": str(tmp_path)}, "steps": 3}
    expected = [keep(fk.Transformer(spec, seed=s), tmp_path, config, s) for s in (1, 2)]
    model, tokenizer, read = fk.load_run(tmp_path)
    assert torch.equal(model(IDS), expected[1])
    assert not model.training
    assert (model.spec, read) == (spec, json.loads((tmp_path / "config.json").read_text()))
    assert tokenizer.decode(tokenizer.encode("to be").ids) == "to be"
    assert torch.equal(fk.load_run(tmp_path, step=1)[0](IDS), expected[0])


ADAPTERS = {
    "of a base": {"targets": ("*.query", "*.value")},
    "dora": {"targets": ("*.down",), "dora": True},
    "rslora": {"targets": ("*.up", "*.value"), "rslora": True},
    "experts": {"targets": ("*.experts", "*.shared.up")},
    "nf4": {"targets": ("*.query", "*.gate"), "base": "nf4"},
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_run_has_its_adapters(case, tmp_path):
    spec, run = MOE if case == "experts" else SPEC, tmp_path / "run"
    base = fk.Transformer(attrs.evolve(spec, rope_scaling=None), seed=1)
    said = {"alpha": 24.0, "targets": ["gone"], "rslora": False}  # the checkpoint's facts count
    said["base"] = ADAPTERS[case].get("base")
    config = {"model": to_dict(base.spec), "lora": said}
    if case == "of a base":
        fk.save_huggingface(base, tmp_path / "base")
        config = {"base": tmp_path / "base"}
    run.mkdir()
    expected = keep(fk.add_lora(base, rank=3, alpha=24.0, **ADAPTERS[case]), run, config)
    model, tokenizer, _ = fk.load_run(str(run))
    assert tokenizer is None
    assert torch.equal(model(IDS), expected)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }


@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_of_a_model_of_transformers_is_one(adapted, tmp_path):
    model = save_model("Qwen2", tmp_path / "base", vocab_size=31)
    if adapted:
        fk.add_lora(model, rank=2, alpha=4.0, targets="*.q_proj")
    expected = keep(model, tmp_path, {"base": str(tmp_path / "base"), "lora": {"alpha": 4.0}})
    found, _, _ = fk.load_run(tmp_path)
    assert type(found) is type(model)
    assert torch.equal(logits_of(found, IDS), expected)


CASES = [
    (None, None, {}, r"config\.json cannot be read: No such file"),
    (None, {"model": SPEC}, {}, r"checkpoints has no checkpoint"),
    (MOE, {"steps": 3}, {}, r"has neither model \(a TransformerSpec\) nor base"),
    (MOE, {"model": SPEC}, {}, r"step_00000003"),
    (MOE, {"base": "gone"}, {}, r"gone/config.json cannot be read: No such file"),
    (MOE, {"model": MOE}, {"step": 7}, r"has no committed step 7"),
]


@pytest.mark.parametrize(("trained", "config", "options", "message"), CASES)
def test_what_is_no_run_is_one_sentence(trained, config, options, message, tmp_path):
    if trained is not None:
        keep(fk.Transformer(trained), tmp_path, {})
    if config is not None:
        tree = {n: to_dict(value) if n == "model" else value for n, value in config.items()}
        (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(fk.CheckpointError, match=message):
        fk.load_run(tmp_path, **options)


# The command


@pytest.fixture
def run(tmp_path):
    """A run directory with two checkpoints, and the data beside it."""
    for name in ("run", "tokens"):
        (tmp_path / name).mkdir()
    TOKENIZER.save(str(tmp_path / "tokens/tokenizer.json"))
    config = {"model": to_dict(PLAIN), "data": {"path": str(tmp_path / "tokens")}}
    for step in (1, 2):
        keep(fk.Transformer(PLAIN, seed=step), tmp_path / "run", config, step)
    return tmp_path / "run"


def test_the_newest_checkpoint_is_written_with_its_tokenizer(run, tmp_path, capsys):
    import transformers

    for options, step in (([], 2), (["--step", "1", "--like", "mistral"], 1)):
        out = tmp_path / f"out{step}"
        assert main(["export", str(run), str(out), *options]) == 0
        assert f"step       {step}\n" in capsys.readouterr().out
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert theirs.config.model_type == ("mistral" if options else "llama")
        expected = fk.load_run(run, step=step)[0](IDS)
        torch.testing.assert_close(logits_of(theirs, IDS), expected, rtol=0, atol=1e-5)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.eos_token_id == theirs.config.eos_token_id == 0
    own = tmp_path / "own.json"
    train_tokenizer(["or not"] * 2, 263).save(str(own))
    options = ["--dtype", "bfloat16", "--tokenizer", str(own)]
    assert main(["export", str(run), str(out), *options]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert (out / "tokenizer.json").read_bytes() == own.read_bytes()


def test_a_run_with_adapters_is_exported_merged_and_like_its_base(tmp_path):
    run, base, out = (tmp_path / name for name in ("run", "base", "out"))
    run.mkdir()
    model = fk.Transformer(PLAIN, seed=1)
    fk.save_huggingface(model, base, TOKENIZER, like="mistral")
    fk.add_lora(model, rank=2, alpha=9.0, targets="*.query")
    expected = keep(model, run, {"base": str(base), "lora": {"rank": 2, "alpha": 9.0}})
    assert main(["export", str(run), str(out)]) == 0
    torch.testing.assert_close(load(out)(IDS), expected, rtol=0, atol=1e-5)
    assert json.loads((out / "config.json").read_text())["model_type"] == "mistral"
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_what_cannot_be_exported_is_one_sentence_and_exit_code_2(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for source, out, message in (
        (run, run, "contains files that were not written"),
        (tmp_path / "empty", tmp_path / "new", "config.json cannot be read"),
    ):
        assert main(["export", str(source), str(out)]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "new").exists()
