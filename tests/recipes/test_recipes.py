"""Each recipe, copied into a folder of its own and run from another one."""

from __future__ import annotations

import ast
import json
import math
import re
import sysconfig
from pathlib import Path

import pytest
from covering import some_of
from runs import arguments, assert_same_run, launch, rows_of, run_here, saved_step, status_of

import forgekit as fk
from forgekit.cli import main, recipes_folder
from forgekit.terminal import printable

TEXT = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return add(a, a)\n\n\n"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Token files with a tokenizer and a held-out part, as ``forgekit prepare`` makes them."""
    folder = tmp_path_factory.mktemp("prepared")
    for number in range(12):
        (folder / f"{number}.py").write_text(TEXT.replace("a", f"a{number}") * 10)
    path = folder / "tokens"
    fk.data.prepare([folder], path, vocab_size=300, held_out_every=4)
    return path


@pytest.fixture(scope="module")
def base(prepared):
    """A tiny model to fine-tune, beside the token files."""
    run_here("tiny_llama", tiny_llama(prepared.parent / "base", prepared))


def minimal(out, data):
    return []


def pretrain(out, data):
    size = fk.data.open_tokens(data).vocab_size
    return arguments(out=out, data__path=data, steps=12, model__vocab_size=size, prompt="def ")


def moe(out, data):
    size = fk.data.open_tokens(data).vocab_size
    shared = ("device", "eval_every", "global_batch_size")
    small = [word for word in arguments(out=out, data__path=data) if not word.startswith(shared)]
    return [
        *small,
        *(f"model.vocab_size={size}", "global_batch_size=4", "steps=12", "loads_every=3"),
        *("model.moe.experts=6", "model.moe.top_k=2", "model.moe.ffn_dim=16", "model.moe.first=1"),
    ]


def replicas(out, data):
    return [word for word in pretrain(out, data) if not word.startswith("prompt")]


def check_replicas(out, output):
    assert status_of(out)["status"] == "finished"
    assert saved_step(out) == 12
    rows = rows_of(out)
    assert [row["samples"] for row in rows] == [*range(8, 97, 8)]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert "eval/heldout/loss" in rows[-1]


def check_moe(out, output):
    names = {path.name for path in out.iterdir()} - {".lock"}
    assert names == {
        *("config.json", "metrics.jsonl", "status.json", "history.jsonl", "checkpoints"),
        *("samples", "loss.png", "report.html", "expert_loads.png"),
    }
    assert status_of(out)["status"] == "finished"
    rows = rows_of(out)
    layer = "moe/load/layers.1.feed_forward"
    loads = {row["step"]: row[layer] for row in rows if layer in row}
    assert list(loads) == [3, 6, 9, 12]
    assert all(sum(load) == pytest.approx(6, abs=0.01) for load in loads.values())
    assert rows[8]["moe/load_max"] == pytest.approx(max(loads[9]), abs=1e-3)
    assert rows[-1]["moe/bias_range"] > rows[0]["moe/bias_range"] == 0
    check_perplexity(rows[-1])
    assert rows[-1]["eval/heldout/bits_per_byte"] > 0
    assert (out / "expert_loads.png").read_bytes().startswith(b"\x89PNG")
    assert f"loads of experts: {out / 'expert_loads.png'}" in output


def foreign(out, data):
    base = out.parent / "base"
    small = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "max_seq_len": 32}
    if not base.exists():
        size = fk.data.open_tokens(data).vocab_size
        fk.save_huggingface(fk.Transformer(fk.TransformerSpec(vocab_size=size, **small)), base)
    settings = [f"base={base}", f"export={out.parent / 'tuned'}", f"data.path={data}"]
    return [f"out={out}", *settings, "steps=12", "lr=0.01", "data.seq_len=16", "log_every=4"]


def check_foreign(out, output):
    losses = [row["train/loss"] for row in rows_of(out)]
    assert losses[-1] < losses[0] - 0.5
    assert saved_step(out) == 12
    spec = fk.huggingface_spec(out.parent / "tuned")
    assert (spec.dim, spec.layers) == (16, 2)
    fk.load_huggingface(fk.Transformer(spec), out.parent / "tuned")


def check_minimal(out, output):
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert not out.exists()


def check_pretrain(out, output):
    names = {path.name for path in out.iterdir()} - {".lock"}
    assert names == {
        *("config.json", "metrics.jsonl", "status.json", "history.jsonl"),
        *("checkpoints", "samples", "loss.png", "report.html"),
    }
    assert status_of(out)["status"] == "finished"
    check_perplexity(rows_of(out)[-1])
    assert rows_of(out)[-1]["eval/heldout/bits_per_byte"] > 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"report: {out / 'report.html'}\n" in output
    assert "step 12" in (out / "report.html").read_text()
    sample = (out / "samples" / "step_00000012.txt").read_text()
    assert sample.startswith("def ")
    assert f"sample ({out / 'samples'}):\n{printable(sample)}\n" in output


def pipeline(out, data):
    return [f"out={out}", "steps=40"]


def check_pipeline(out, output):
    assert "rank 0 holds 39 parameters" in output
    check_demonstration(out, output)


def rollout(out, data):
    return [f"out={out}", "steps=100", "save_every=25"]


def check_rollout(out, output):
    rewards = [row["rollout/reward"] for row in rows_of(out)]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9
    assert status_of(out)["status"] == "finished"
    assert saved_step(out) == 100


def check_demonstration(out, output):
    losses = [row["train/loss"] for row in rows_of(out)]
    assert len(losses) == 2
    assert losses[1] < 0.7 * losses[0]
    assert status_of(out)["status"] == "finished"
    assert saved_step(out) == status_of(out)["step"] == rows_of(out)[-1]["step"]


def long_context(out, data):
    return [f"out={out}", "steps=100", "log_every=50", "seq_len=128", "documents=2"]


def curriculum(out, data):
    names = {"asyncio": "json", "mail": "html", "tables": "logging"}
    sources = {key: Path(sysconfig.get_path("stdlib"), name) for key, name in names.items()}
    small = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 512}
    return [
        *(f"data.sources.{name}={folder}" for name, folder in sources.items()),
        *(f"model.{name}={size}" for name, size in small.items()),
        *(f"data.path={out.parent / 'data'}", f"out={out}", "data.seq_len=64"),
        *("steps=12", "warmup=2", "decay=4", "log_every=1", "global_batch_size=16"),
        "phases=[{step=6, weights={tables=0}, lr_scale=0.5}]",
    ]


def check_curriculum(out, output):
    assert status_of(out)["status"] == "finished"
    assert "step 12/12" in output
    rows = rows_of(out)
    assert [row["samples"] for row in rows] == list(range(16, 193, 16))
    assert [row["source/tables/targets"] > 0 for row in rows] == [True] * 6 + [False] * 6
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    prepared = {path.name for path in (out.parent / "data").iterdir() if path.name[0] != "."}
    assert prepared == {"all", "asyncio", "mail", "tables", "bins"}
    for name in ("asyncio", "mail", "tables"):
        tokenizers = [out.parent / "data" / folder / "tokenizer.json" for folder in (name, "all")]
        assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def tiny_llama(out, data):
    texts = recipes_folder() / "examples" / "chats.jsonl"
    small = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 32}
    return [f"out={out}", f"texts={texts}", *(f"model.{name}={n}" for name, n in small.items())]


def check_tiny_llama(out, output):
    assert re.search(r"out: a Llama of [\d,]+ parameters", output)
    assert fk.huggingface_spec(out).dim == 16
    assert (out / "chat_template.jinja").exists() or "chat_template" in (
        out / "tokenizer_config.json"
    ).read_text()


def tuned(out, base, data):
    sizes = ("steps=4", "seq_len=128", "global_batch_size=4", "batch_size=4", "log_every=1")
    lines = recipes_folder() / "examples" / data
    return [f"base={base}", f"data.path={lines}", f"out={out}", *sizes, "device=cpu"]


def finetune(out, data):
    return [*tuned(out, data.parent / "base", "chats.jsonl"), f"export={out / 'tuned'}"]


def dpo(out, data):
    return tuned(out, data.parent / "base", "preferences.jsonl")


def check_finetune(out, output):
    check_tuned(out, output)
    check_perplexity(rows_of(out)[-1])
    assert "38 examples of 38 lines" in output
    assert f"exported to {out / 'tuned'}" in output
    config = json.loads((out / "config.json").read_text())
    assert fk.huggingface_spec(config["export"]) == fk.huggingface_spec(config["base"])


def check_dpo(out, output):
    check_tuned(out, output)
    last = rows_of(out)[-1]
    assert last["eval/heldout/dpo/accuracy"] <= 1
    assert not any("perplexity" in name or "bits" in name for name in last), "of pairs"


def check_perplexity(row):
    expected = math.exp(row["eval/heldout/loss"])
    assert row["eval/heldout/perplexity"] == pytest.approx(expected, rel=1e-12)


def check_tuned(out, output):
    assert status_of(out)["status"] == "finished"
    assert saved_step(out) == 4
    rows = rows_of(out)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert rows[-1]["eval/heldout/loss"] > 0


RECIPES = {
    "minimal": (minimal, check_minimal),
    "pretrain": (pretrain, check_pretrain),
    "moe": (moe, check_moe),
    "pipeline": (pipeline, check_pipeline),
    "long_context": (long_context, check_demonstration),
    "curriculum": (curriculum, check_curriculum),
    "foreign": (foreign, check_foreign),
    "tiny_llama": (tiny_llama, check_tiny_llama),
    "finetune": (finetune, check_finetune),
    "dpo": (dpo, check_dpo),
    "rollout": (rollout, check_rollout),
    "replicas": (replicas, check_replicas),
}


def test_each_recipe_has_a_row():
    assert {path.stem for path in recipes_folder().glob("*.py")} == RECIPES.keys()


# In `replicas` the other groups say which micro-batches come next, and whether a step counts.
LOOPS = [name for name in RECIPES if name not in ("minimal", "tiny_llama", "replicas")]
LOOP = [
    "groups = fk.groups(loader, ",
    "log = run.start(built, ",  # from here on nothing is a usage error
    "for batches in groups:",
    "run.is_over(state):",
    "break",
    "state, metrics = step(state, batches)",
    "log(state, metrics)",
]
"""What stands in each recipe's loop, in this order."""


def functions(name):
    """The functions of a recipe by name, and their text."""
    text = (recipes_folder() / f"{name}.py").read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: (node, ast.get_source_segment(text, node)) for node in found}


def nesting(node):
    """How many blocks of a function stand inside each other."""
    blocks = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef)
    below = [nesting(child) for child in ast.iter_child_nodes(node)]
    return max(below, default=0) + isinstance(node, blocks)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_without_opening_the_library(name):
    """Short and flat, each argument written out: nothing is passed that no line names."""
    text = (recipes_folder() / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 150
    assert max(nesting(node) for node, _ in functions(name).values()) <= 1 + 3
    for word in ("getattr", "**", "setattr", "lambda", "globals"):
        assert word not in text, word


@pytest.mark.parametrize("name", LOOPS)
def test_the_recipes_read_alike(name):
    found = functions(name)
    assert list(found)[-4:] == ["loss_fn", "setup", "train", "main"] or name == "curriculum"
    main = functions("pretrain")["main"][1]
    assert found["main"][1] == main or name == "rollout"  # which samples for a trainer too
    assert isinstance(last := found["setup"][0].body[-1], ast.Return)
    assert ast.unparse(last).startswith("return fk.Setup(state=state, step=step, loader=loader, ")
    loop = found["train"][1]
    places = [loop.index(line) for line in LOOP]
    assert places == sorted(places)
    assert [loop.count(line) for line in (*LOOP, "run.end(state)")] == [1] * (len(LOOP) + 1)


@pytest.mark.parametrize("name", some_of(RECIPES, "tiny_llama", "finetune", "dpo"))
def test_a_copy_runs_from_another_folder(name, tmp_path, prepared, request):
    command_line, check = RECIPES[name]
    if name in ("finetune", "dpo"):
        request.getfixturevalue("base")
    home, elsewhere, out = tmp_path / "home", tmp_path / "elsewhere", tmp_path / "out"
    home.mkdir()
    elsewhere.mkdir()
    copy = home / "mine.py"
    assert main(["cp", name, str(copy)]) == 0
    header = rf"# Copied from forgekit \S+ recipes/{name}\.py \(sha256 [0-9a-f]{{8}}\)\."
    assert re.match(header, copy.read_text())
    given = command_line(out, prepared)
    with launch(copy, given, log=tmp_path / "log", cwd=elsewhere) as job:
        assert job.end() == 0, job.output
    check(out, job.output)
    assert [path.name for path in elsewhere.iterdir()] == []


NOWHERE = {
    "a mesh of other ranks": ({}, ["mesh.tp=2"], "error: .*tp 2.* 1 rank "),
    "a rank beyond the world": (
        {"RANK": "2", "WORLD_SIZE": "2"},
        [],
        "error: .*RANK is '2'; ranks",
    ),
    "a rank in letters": ({"RANK": "x", "WORLD_SIZE": "2"}, [], "error: .*RANK is 'x'"),
}


@pytest.mark.parametrize("case", NOWHERE)
@pytest.mark.parametrize("name", LOOPS)
def test_a_run_that_its_ranks_cannot_make_exits_2_with_a_sentence(
    name, case, tmp_path, prepared, monkeypatch, capsys
):
    environment, given, message = NOWHERE[case]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as stop:
        run_here(name, [*RECIPES[name][0](tmp_path / "out", prepared), *given])
    assert stop.value.code == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert re.match(message, shown), shown
    if not environment:
        assert status_of(tmp_path / "out")["status"] == "failed"


@pytest.mark.parametrize("name", some_of(["pipeline", "long_context"], "pipeline"))
def test_a_demonstration_goes_on_where_it_was_stopped(name, tmp_path, prepared, monkeypatch):
    """Its data are numbered by the samples that the state has seen."""
    given = [*RECIPES[name][0](tmp_path / "whole", prepared), "steps=6", "log_every=1"]
    run_here(name, given)
    parts = [word.replace("whole", "parts") for word in given]
    steps = fk.make_step

    def stopping(*arguments, stop, **options):
        step = steps(*arguments, stop=stop, **options)

        def counted(state, batches):
            if state.step == 1:
                stop.request("enough")
            return step(state, batches)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(fk, "make_step", stopping)
        run_here(name, parts)
    assert (status_of(tmp_path / "parts")["reason"], saved_step(tmp_path / "parts")) == (
        "enough",
        4,
    )
    run_here(name, parts)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_recipe_runs_without_a_copy(tmp_path, prepared):
    given = [*pretrain(tmp_path / "out", prepared), "steps=1"]
    assert main(["run", "pretrain", *given]) == 0
    assert (tmp_path / "out" / "samples" / "step_00000001.txt").read_text().startswith("def ")
    assert status_of(tmp_path / "out")["status"] == "finished"
