"""``forgekit export``: the newest checkpoint of a run, as transformers opens it."""

from __future__ import annotations

import json
import re

import attrs
import pytest
import torch
from run.huggingface_models import logits_of

import forgekit as fk
from forgekit.cli import main
from forgekit.data.tokenizer import train_tokenizer

PLAIN = fk.TransformerSpec(
    vocab_size=264, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=32
)
SPEC = attrs.evolve(PLAIN, rope_scaling=fk.RopeScaling(kind="linear", factor=2.0))


@pytest.fixture
def run(tmp_path):
    """A run directory with two checkpoints, and the data beside it."""
    folder = tmp_path / "run"
    folder.mkdir()
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    train_tokenizer(["to be or not to be"] * 2, 264).save(str(tokens / "tokenizer.json"))
    config = {"model": attrs.asdict(SPEC), "data": {"path": str(tokens)}}
    (folder / "config.json").write_text(json.dumps(config))
    for step in (1, 2):
        model = fk.Transformer(SPEC, seed=step)
        state = fk.donate(fk.TrainState.create(model, fk.adamw(model)), step=step)
        fk.checkpoint_save(state, folder / "checkpoints", blocking=True)
    return folder


def test_the_newest_checkpoint_is_written_with_its_tokenizer(run, tmp_path, capsys):
    import transformers

    ids = torch.arange(20).reshape(2, 10)
    for options, seed in (([], 2), (["--step", "1", "--like", "mistral"], 1)):
        out = tmp_path / f"out{seed}"
        assert main(["export", str(run), str(out), *options]) == 0
        assert f"step       {seed}\n" in capsys.readouterr().out
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert theirs.config.model_type == ("mistral" if options else "llama")
        expected = logits_of(fk.Transformer(SPEC, seed=seed), ids)
        torch.testing.assert_close(logits_of(theirs, ids), expected, rtol=0, atol=1e-5)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.eos_token_id == theirs.config.eos_token_id == 0
    assert main(["export", str(run), str(tmp_path / "out2"), "--dtype", "bfloat16"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out2")
    assert theirs.dtype == torch.bfloat16


def test_a_run_with_adapters_is_exported_merged_and_like_its_base(tmp_path):
    run, base, out = (tmp_path / name for name in ("run", "base", "out"))
    model = fk.Transformer(PLAIN, seed=1)
    tokenizer = train_tokenizer(["to be or not to be"] * 2, 264)
    fk.save_huggingface(model, base, tokenizer, like="mistral")
    fk.add_lora(model, rank=2, alpha=9.0, targets="*.query")
    with torch.no_grad():
        model.layers[1].attention.query.lora_B.fill_(0.1)
    state = fk.TrainState.create(model, fk.adamw(model))
    fk.checkpoint_save(fk.donate(state, step=4), run / "checkpoints", blocking=True)
    config = {"base": str(base), "lora": {"rank": 2, "alpha": 9.0}}
    (run / "config.json").write_text(json.dumps(config))
    assert main(["export", str(run), str(out), "--check"]) == 0
    ids = torch.arange(20).reshape(2, 10)
    tuned = fk.Transformer(fk.huggingface_spec(out))
    fk.load_huggingface(tuned, out)
    torch.testing.assert_close(tuned(ids), model(ids), rtol=0, atol=1e-5)
    assert json.loads((out / "config.json").read_text())["model_type"] == "mistral"
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


CASES = {
    "no checkpoint": (["run", "new"], r"checkpoints has no checkpoint\."),
    "a full directory": (["run", "run"], "holds files that were not written"),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES)
def test_what_cannot_be_exported_is_one_sentence_and_exit_code_2(
    run, tmp_path, arguments, message, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if "new" in arguments:
        (run / "checkpoints").rename(run / "elsewhere")
    assert main(["export", *arguments]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said.replace("\n", " ")), said
    assert not (tmp_path / "new").exists()
