"""``forgekit verify`` on the recipe: exact in every layout; what it says of a broken copy."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from covering import some_of
from runs import TINY

from forgekit.cli import main, recipes_folder

EXACT = 1e-12
UNTIED = "model.tied=false"
ROUTED = [f"model.moe.{word}" for word in ("experts=6", "top_k=2", "ffn_dim=16", "z_loss=0.1")]
LAYOUTS = {
    "pp": ["mesh.pp=2", UNTIED],
    "dp_replicate": ["mesh.dp_replicate=2"],
    "one process": ["model.dropout=0.1", "precision=bf16", "compile=true"],
    "8 ranks": ["mesh.dp_shard=2", "mesh.cp=2", "mesh.tp=2", "data.doc_ids=true"],
    "8 ranks, pipelined": ["mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2", UNTIED],
    "experts": [*ROUTED, "mesh.dp_shard=2", "mesh.ep=2"],  # some of them get no token
}
BREAKS = """
    return fk.Loss(loss.sum / loss.count, 1)
"""


def command(tokens, *settings, recipe="pretrain"):
    left = ("device", "log_every", "save_every", "eval_every", "global_batch_size", "batch_size")
    small = [f"{name}={value}" for name, value in TINY.items() if name not in left]
    return ["verify", str(recipe), f"data.path={tokens}", "out=run", *small, *settings]


@pytest.mark.parametrize("name", some_of(LAYOUTS, *LAYOUTS.keys() - {"pp", "one process"}))
def test_the_recipe_is_exact_in_every_layout(name, tokens, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = "moe" if name == "experts" else "pretrain"
    code = main(command(tokens, *LAYOUTS[name], recipe=recipe))
    shown = capsys.readouterr()
    assert code == 0, shown
    (worst,) = re.findall(r"^equal: .* worst (\S+) \(\S+\)$", shown.out, re.M)
    assert 0 < float(worst) < EXACT, shown.out
    assert list(tmp_path.iterdir()) == []


def test_its_options_are_those_of_the_check(tokens, monkeypatch):
    seen = []
    equal = SimpleNamespace(equal=True)
    target = "forgekit.verification.verify.verify_setup"
    monkeypatch.setattr(target, lambda setup, mesh, chosen: seen.append(chosen) or equal)
    given = ["--keep-split", "--tolerance", "0.5", "--timeout", "7"]
    word, *others = command(tokens)
    assert main([word, *given, *others]) == 0
    (chosen,) = seen
    assert (chosen.split, chosen.tolerance, chosen.timeout_s) == (False, 0.5, 7)


def test_a_loss_that_divides_within_a_micro_batch_ends_with_code_1(tokens, tmp_path, capsys):
    text = (recipes_folder() / "pretrain.py").read_text()
    start, end = "    return model(", "doc_ids=doc_ids, head=head)\n"
    assert text.count(start) == text.count(end) == 1
    text = text.replace(start, "    loss = model(").replace(end, end.rstrip() + BREAKS)
    (tmp_path / "mine.py").write_text(text)
    assert main(command(tokens, "mesh.dp_shard=2", recipe=tmp_path / "mine.py")) == 1
    shown = capsys.readouterr()
    assert re.search(r"^different: micro-batches break; ", shown.out, re.M), shown.out
    assert re.search(r"^different +micro-batches +1 rank", shown.out, re.M)
    assert "Return fk.Loss(sum, count) with nothing divided in loss_fn" in shown.out


def test_a_layout_that_the_recipe_refuses_ends_with_code_1(tokens, capsys):
    assert main(command(tokens, "mesh.pp=2")) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^failed: pp=2: rank \d of 2 raised ValueError: embedding.weight and", shown)
