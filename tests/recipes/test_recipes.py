"""Each recipe, copied into a folder of its own and run from another one."""

from __future__ import annotations

import json
import math
import re
import sysconfig
from functools import partial
from pathlib import Path

import pytest
from covering import some_of
from runs import (
    arguments,
    assert_same_run,
    launch,
    load_recipe,
    rows_of,
    run_here,
    saved_step,
    status_of,
    tensors_of,
)
from saved import assert_same

import forgekit as fk
from forgekit.cli import main, recipes_folder
from forgekit.config import keys_of
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


def finished(out, step):
    """Rows of a run that has ended well, at a step that it has saved."""
    assert (status_of(out)["status"], status_of(out)["step"]) == ("finished", step)
    assert saved_step(out) == step
    assert f"finished; step {step} of" in (out / "report.html").read_text()
    return rows_of(out)


def check_replicas(out, output):
    check_falls(12, 1, out, output)
    assert "eval/heldout/loss" in rows_of(out)[-1]


FILES = {
    *("config.json", "metrics.jsonl", "status.json", "history.jsonl", "checkpoints"),
    *("samples", "loss.png", "report.html", ".lock"),
}


def check_moe(out, output):
    assert {path.name for path in out.iterdir()} == FILES
    rows = finished(out, 12)
    layer = "moe/load/layers.1.feed_forward"
    loads = {row["step"]: row[layer] for row in rows if layer in row}
    assert list(loads) == [3, 6, 9, 12]
    assert all(sum(load) == pytest.approx(6, abs=0.01) for load in loads.values())
    assert rows[8]["moe/load_max"] == pytest.approx(max(loads[9]), abs=1e-3)
    assert rows[-1]["moe/bias_range"] > rows[0]["moe/bias_range"] == 0
    check_perplexity(rows[-1])
    assert rows[-1]["eval/heldout/bits_per_byte"] > 0


def foreign(out, data):
    base, size = out.parent / "base", fk.data.open_tokens(data).vocab_size
    small = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "max_seq_len": 32}
    fk.save_huggingface(fk.Transformer(fk.TransformerSpec(vocab_size=size, **small)), base)
    settings = [f"base={base}", f"export={out.parent / 'tuned'}", f"data.path={data}"]
    return [f"out={out}", *settings, "steps=12", "lr=0.01", "data.seq_len=16", "log_every=4"]


def check_foreign(out, output):
    check_falls(12, 0.9, out, output)
    spec = fk.huggingface_spec(out.parent / "tuned")
    assert (spec.dim, spec.layers) == (16, 2)
    fk.load_huggingface(fk.Transformer(spec), out.parent / "tuned")


def check_minimal(out, output):
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert not out.exists()


def check_pretrain(out, output):
    assert {path.name for path in out.iterdir()} == FILES
    last = finished(out, 12)[-1]
    check_perplexity(last)
    assert last["eval/heldout/bits_per_byte"] > 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"report: {out / 'report.html'}\n" in output
    sample = (out / "samples" / "step_00000012.txt").read_text()
    assert sample.startswith("def ")
    assert f"sample ({out / 'samples'}):\n{printable(sample)}\n" in output


def pipeline(out, data):
    return [f"out={out}", "steps=40"]


def check_falls(step, share, out, output):
    first, *_, last = (row["train/loss"] for row in finished(out, step))
    assert last < share * first


def rollout(out, data):
    few = ["global_batch_size=4", "answers=32", "lr=0.01"]  # of calls that sample
    return [f"out={out}", "steps=30", "save_every=15", *few]


def check_rollout(out, output):
    rewards = [row["rollout/reward"] for row in finished(out, 30)]
    assert 0 < 2 * rewards[0] < rewards[-1]


def long_context(out, data):
    return [f"out={out}", "steps=30", "log_every=15", "seq_len=64", "documents=2"]


SOURCES = {"asyncio": "json", "mail": "tomllib", "tables": "wsgiref"}


def curriculum(out, data):
    sources = {key: Path(sysconfig.get_path("stdlib"), name) for key, name in SOURCES.items()}
    small = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 512}
    return [
        *(f"data.sources.{name}={folder}" for name, folder in sources.items()),
        *(f"model.{name}={size}" for name, size in small.items()),
        *(f"data.path={out.parent / 'data'}", f"out={out}", "data.seq_len=64"),
        *("steps=12", "warmup=2", "decay=4", "log_every=1", "global_batch_size=16"),
        "phases=[{step=3, weights={tables=0}, lr_scale=0.5}]",
    ]


def check_curriculum(out, output):
    assert "step 12/12" in output
    rows = finished(out, 12)
    assert [row["samples"] for row in rows] == list(range(16, 193, 16))
    assert [row["source/tables/targets"] > 0 for row in rows] == [True] * 3 + [False] * 9
    assert all(row["source/asyncio/targets"] + row["source/mail/targets"] > 0 for row in rows)
    peak = rows[1]["train/lr"]
    assert [row["train/lr"] / peak for row in rows[:9]] == [0.5, 1, 1, *[0.5] * 6]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    for row in rows:
        parts = [(row[f"source/{n}/loss"], row[f"source/{n}/targets"]) for n in SOURCES]
        total = sum(loss * targets for loss, targets in parts if targets)
        assert total / row["train/targets"] == pytest.approx(row["train/loss"], rel=1e-6)
    tokenizers = [out.parent / "data" / name / "tokenizer.json" for name in (*SOURCES, "all")]
    assert len({path.read_bytes() for path in tokenizers}) == 1


def tiny_llama(out, data):
    texts = recipes_folder() / "examples" / "chats.jsonl"
    small = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 32}
    return [f"out={out}", f"texts={texts}", *(f"model.{name}={n}" for name, n in small.items())]


def check_tiny_llama(out, output):
    assert re.search(r"out: a Llama of [\d,]+ parameters", output)
    assert fk.huggingface_spec(out).dim == 16


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
    rows = finished(out, 4)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert rows[-1]["eval/heldout/loss"] > 0


RECIPES = {
    "minimal": (minimal, check_minimal),
    "pretrain": (pretrain, check_pretrain),
    "moe": (moe, check_moe),
    "pipeline": (pipeline, partial(check_falls, 40, 0.7)),
    "long_context": (long_context, partial(check_falls, 30, 0.99)),
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


OWN_MAIN = ("minimal", "tiny_llama", "rollout")
TEXTS = {name: (recipes_folder() / f"{name}.py").read_text() for name in RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_without_opening_the_library(name):
    """Short, each argument written out: nothing is passed that no line names."""
    text, end = TEXTS[name], TEXTS["pretrain"].partition("\ndef main():\n")[2]
    assert len(text.splitlines()) <= 150
    for word in ("getattr", "**", "setattr", "lambda", "globals"):
        assert word not in text, word
    assert text.endswith(f"\ndef main():\n{end}") or name in OWN_MAIN


def test_a_recipe_reads_each_of_its_keys():
    """One that no line reads would be ignored in silence; ``open_run`` reads the trackers."""
    unread = []
    for name in RECIPES.keys() - {"minimal"}:
        for key, *_ in keys_of(load_recipe(name).Config):
            path = re.sub(r"^(mesh|model)\..*", r"\1", key)  # specs are passed on whole
            read = rf"\b{'' if '.' in path else 'config.'}{re.escape(path)}\b"
            is_inner = "[" in key or ".NAME." in key
            if not (is_inner or key == "trackers" or re.search(read, TEXTS[name])):
                unread.append(f"{name}: {key}")
    assert unread == []


@pytest.mark.parametrize("name", some_of(RECIPES, "tiny_llama", "finetune", "dpo", "pipeline"))
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


UNKNOWN = 'the phase at sample 48: weights name "mails"; the sources are "asyncio", "mail"'
BAD = {
    # The others have the main of pretrain, which has a table of refusals.
    "ranks that it cannot use": ("rollout", "mesh.tp=2", "error: .*tp 2.* 1 rank[;,. ]"),
    "an unknown source": ("curriculum", "phases=[{step=3, weights={mails=1}}]", UNKNOWN),
    "a phase of no step": ("curriculum", "phases=[{weights={mail=1}}]", r"phases\[0\].step: "),
    "no room": ("curriculum", "decay=51", r"warmup 2 \+ decay 51 = 53 must fit into total 12"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_exits_2_with_a_sentence(case, prepared, capsys):
    recipe, argument, sentence = BAD[case]
    out = prepared.parent / "bad" / case.replace(" ", "_")
    with pytest.raises(SystemExit) as stop:
        run_here(recipe, [*RECIPES[recipe][0](out, prepared), argument])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert re.search(sentence, shown), shown
    assert rows_of(out) == []


def test_sources_that_are_given_take_the_place_of_the_default_ones(tmp_path):
    recipe = load_recipe("curriculum")
    a, b = (Path(sysconfig.get_path("stdlib"), name) for name in ("json", "tomllib"))
    given = [f"data.sources={{a='{a}', b='{b}'}}", f"data.path={tmp_path}", "data.seq_len=32"]
    config = recipe.load_config(recipe.Config, given)
    recipe.write_token_files(config.data, 300)
    with pytest.raises(ValueError, match=r'^weights lack "a", "b"; pass one'):
        recipe.build_dataset(config.data, [], 0)
    config = recipe.load_config(recipe.Config, [*given, "data.weights={a=1,b=3}"])
    order = recipe.build_dataset(config.data, [], 0).order
    assert order.sources == ("a", "b")
    assert order.shares(0, 2**20).tolist() == pytest.approx([0.25, 0.75], abs=0.01)


LORA = ["lora.rank=2", "lora.alpha=8", "lora.dropout=0.2", "lora.dora=true", "lora.rslora=true"]
RESUMED = {
    "curriculum": ("curriculum", []),
    "pipeline": ("pipeline", ["log_every=1"]),
    "adapters": ("finetune", [*LORA, "optim.lr=0.01"]),
    "preferences": ("dpo", ["lr=0.01"]),
    "long context": ("long_context", ["log_every=1"]),
    "all weights": ("finetune", ["optim.lr=0.01"]),
    "preferences beside a copy": ("dpo", ["reference=model", "lora.rank=0"]),
    "experts": ("moe", []),
}
QUICK = ("curriculum", "pipeline", "adapters", "preferences")


@pytest.mark.parametrize("kind", some_of(RESUMED, *RESUMED.keys() - QUICK))
def test_a_stopped_run_goes_on_bit_for_bit(kind, tmp_path, prepared, base, monkeypatch):
    """Its data are numbered by the samples that the state has seen; here inside a phase too."""
    (name, settings), make_step = RESUMED[kind], fk.make_step

    def asked_in_the_second_step(*arguments, stop, **options):
        step = make_step(*arguments, stop=stop, **options)

        def asking(state, batches):
            if state.step == 1:
                stop.request("enough")
            return step(state, batches)

        return asking

    given = [*RECIPES[name][0](tmp_path / "whole", prepared), "steps=6", *settings]
    run_here(name, given)
    parts = [word.replace("whole", "parts") for word in given]
    with monkeypatch.context() as patch:
        patch.setattr(fk, "make_step", asked_in_the_second_step)
        run_here(name, parts)
    stopped = status_of(tmp_path / "parts")
    assert (stopped["status"], stopped["reason"]) == ("stopped", "enough")
    assert 0 < stopped["step"] == saved_step(tmp_path / "parts") < 6
    run_here(name, parts)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_rollouts_go_on_bit_for_bit_and_publish_what_no_kill_undoes(tmp_path, monkeypatch):
    publish = fk.publish_weights

    def checked(state, where, version):
        assert saved_step(where.parent) == version
        return publish(state, where, version)

    monkeypatch.setattr(fk, "publish_weights", checked)
    for out, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        few = [f"steps={steps}", "save_every=1", "answers=4"]
        run_here("rollout", [*rollout(tmp_path / out, None), *few])
    assert_same(tensors_of(tmp_path / "parts"), tensors_of(tmp_path / "whole"))


def test_replica_groups_are_told_what_has_to_be_the_same_and_when_to_stop(
    tmp_path, prepared, monkeypatch
):
    join, told = fk.join_replicas, {}

    def noting(*given, **options):
        told.update(options)
        return join(*given, **options)

    monkeypatch.setattr(fk, "join_replicas", noting)
    run_here("replicas", [*replicas(tmp_path, prepared), "steps=1"])
    assert isinstance(told["also"]["stop"], fk.StopSignal)
    assert told["settings"].keys() >= {"optim", "model", "mesh", "steps", "max_norm", "precision"}
    assert not told["settings"].keys() & {"group", "out"}
