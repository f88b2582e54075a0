"""``forgekit verify`` on the recipe: exact in every layout; what it says of a broken copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runs import TINY

from forgekit.cli import main, recipes_folder

EXACT = 1e-12
UNTIED = "model.tied=false"
LAYOUTS = {
    "tp": ["mesh.tp=2"],
    "cp": ["mesh.cp=2", "data.doc_ids=true"],
    "pp": ["mesh.pp=2", UNTIED],
    "dp_shard": ["mesh.dp_shard=2"],
    "dp_replicate": ["mesh.dp_replicate=2"],
    "8 ranks": ["mesh.dp_shard=2", "mesh.cp=2", "mesh.tp=2", "data.doc_ids=true"],
    "8 ranks, pipelined": ["mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2", UNTIED],
    "one process": ["model.dropout=0.1", "precision=bf16", "compile=true"],
}
LONG = ("tp", "cp", "dp_shard", "8 ranks", "8 ranks, pipelined")
"""Part of `make oracle`; the others cover each kind of run."""
BREAKS = """        head=partial(fk.linear_cross_entropy, labels=batch["labels"]),
    )
    return fk.Loss(loss.sum / loss.count, 1)
"""
PAGE = Path(__file__).parents[2] / "docs" / "verify.md"


def command(tokens, *settings, recipe="pretrain"):
    left = ("device", "log_every", "save_every", "eval_every", "global_batch_size", "batch_size")
    small = [f"{name}={value}" for name, value in TINY.items() if name not in left]
    return ["verify", str(recipe), f"data.path={tokens}", "out=run", *small, *settings]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.oracle] * (name in LONG)) for name in LAYOUTS]
)
def test_the_recipe_is_exact_in_every_layout(name, tokens, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(command(tokens, *LAYOUTS[name]))
    shown = capsys.readouterr()
    assert code == 0, shown
    (worst,) = re.findall(r"^equal: .* worst (\S+) \(\S+\)$", shown.out, re.M)
    assert 0 < float(worst) < EXACT, shown.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.oracle
def test_the_recipe_with_experts_is_exact_where_ranks_share_them(tokens, tmp_path, capsys):
    """With a router term; some experts get no token."""
    moe = [f"model.moe.{name}" for name in ("experts=6", "top_k=2", "ffn_dim=16", "z_loss=0.1")]
    code = main(command(tokens, *moe, "mesh.dp_shard=2", "mesh.ep=2", recipe="moe"))
    shown = capsys.readouterr()
    assert code == 0, shown
    (worst,) = re.findall(r"^equal: .* worst (\S+) \(\S+\)$", shown.out, re.M)
    assert 0 < float(worst) < EXACT, shown.out


def test_a_loss_that_divides_within_a_micro_batch_ends_with_code_1(tokens, tmp_path, capsys):
    text = (recipes_folder() / "pretrain.py").read_text()
    start, end = "    return model(\n", BREAKS[: BREAKS.index("    return")]
    assert text.count(start) == text.count(end) == 1
    text = text.replace(start, "    loss = model(\n").replace(end, BREAKS)
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


def shapes(text):
    """The kind of each line: its words, with names and numbers left out."""
    text = re.sub(r"[\w.]*\.weight", "NAME", text)
    text = re.sub(r"\d[\d.e+-]*", "#", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_the_output_on_the_page_is_what_the_command_prints(tokens, capsys):
    (page,) = re.findall(r"```text\n\$ forgekit verify .*?\n(.*?)```", PAGE.read_text(), re.S)
    assert main(command(tokens, "mesh.tp=2")) == 0
    shown = capsys.readouterr()
    assert set(shapes(page)) == set(shapes(shown.err + shown.out))
