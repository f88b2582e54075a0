"""Fine-tuning by recipe: from a base to an export, stopped and moved on the way; refusals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from pool import run_ranks
from runs import results, rows_of, run_here, saved_step, status_of, tensors_of

import forgekit as fk
from forgekit.cli import main, recipes_folder

README = Path(__file__).parents[2] / "README.md"
CHATS, PAIRS = (recipes_folder() / "examples" / f"{n}.jsonl" for n in ("chats", "preferences"))
SMALL = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 32, "vocab_size": 300}
RECIPES = {"finetune": CHATS, "dpo": PAIRS}
LORA = {"lora.rank": 2, "lora.alpha": 8.0}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny"
    sizes = [f"model.{name}={size}" for name, size in SMALL.items()]
    run_here("tiny_llama", [f"out={path}", f"texts={CHATS}", *sizes])
    return path


def command_line(recipe, base, out, /, **settings):
    given = {"base": base, "out": out, "data.path": RECIPES[recipe], "device": "cpu", "steps": 6}
    given |= {"seq_len": 256, "global_batch_size": 4, "batch_size": 2, "log_every": 1}
    given |= {"save_every": 2, "eval_every": 3, "optim.lr" if recipe == "finetune" else "lr": 1e-2}
    return [f"{name}={value}" for name, value in (given | settings).items()]


@pytest.mark.oracle
def test_the_path_of_the_readme_leads_to_a_model_that_answers(tmp_path, monkeypatch, capsys):
    """As it is written there, offline: a base, a run, and transformers with what was exported."""
    section = re.search(r"## Fine-tune\n(.*?)\n## ", README.read_text(), re.S)[1]
    console, script = (
        re.search(rf"```{kind}\n(.*?)```", section, re.S)[1] for kind in ("console", "python")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(recipes_folder())
    commands = [shlex.split(c) for c in console.replace("\\\n", " ").split("\n") if c[:2] == "$ "]
    assert [command[1] for command in commands] == ["pip", "python", "python"]
    for _, _, recipe, *given in commands[1:]:
        assert Path(recipe).is_file()
        run_here(Path(recipe).stem, given)
    shown = capsys.readouterr().err
    assert "exported to runs/tuned" in shown
    *_, loss = re.findall(r"100/100  loss (\S+)", shown)
    *_, (held_out, targets) = re.findall(r"heldout/loss (\S+) .*targets (\S+)", shown)
    assert (float(loss) < 0.25, float(held_out) > 6, float(targets)) == (True, True, 35)
    exec(compile(script, "README.md", "exec"), {})
    answer = capsys.readouterr().out.strip()
    lines = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    (question,) = re.findall(r'"content": "(.*?)"', script)
    assert [m[1]["content"] for m in lines if m[0]["content"] == question] == [answer]
    assert f"# {answer}\n" in script
    assert str(len(lines)) in section


@pytest.mark.filterwarnings("ignore")  # of peft and transformers
def test_an_export_is_the_model_with_its_adapters_and_peft_reads_them_apart(base, tmp_path):
    import peft
    import transformers

    out, tuned = tmp_path / "run", tmp_path / "tuned"
    settings = {"export": tuned, "steps": 2, "lora.dropout": 0.2, **LORA}
    run_here("finetune", command_line("finetune", base, out, **settings))
    model = fk.Transformer(fk.huggingface_spec(base))
    fk.add_lora(model, rank=2, alpha=8.0, targets=("*.query", "*.value"))
    state = fk.TrainState.create(model, fk.adamw(model))
    state = fk.checkpoint_load(state, out / "checkpoints", allow_other_data=True)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        wanted = state.model(ids)
        start = fk.Transformer(fk.huggingface_spec(base))
        fk.load_huggingface(start, base)
        assert (start(ids) - wanted).abs().max() > 1e-3
        opened = transformers.AutoModelForCausalLM.from_pretrained(tuned)
        torch.testing.assert_close(opened(ids).logits, wanted, rtol=0, atol=1e-5)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
        theirs = peft.PeftModel.from_pretrained(theirs, out / "adapter").eval()
        torch.testing.assert_close(theirs(ids).logits, wanted, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(base).chat_template
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_weights_are_exported_in_the_dtype_of_the_base(base, tmp_path):
    model = fk.Transformer(fk.huggingface_spec(base))
    fk.load_huggingface(model, base)
    half = tmp_path / "half"
    fk.save_huggingface(model, half, like=base, dtype=torch.bfloat16)
    state = fk.TrainState.create(fk.add_lora(model, rank=1), fk.adamw(model))
    fk.load_huggingface(model, half)
    said = fk.huggingface.export_tuned(state, tmp_path, tmp_path / "again", base=half)
    assert said == f"exported to {tmp_path / 'again'}, its adapters alone: {tmp_path / 'adapter'}"
    fk.merge_lora(model)  # which it is not any more
    one, other = (path / "model.safetensors" for path in (half, tmp_path / "again"))
    assert one.read_bytes() == other.read_bytes()


REFUSED = {
    "no data": ({"data.path": "nowhere.jsonl"}, "error: nowhere.jsonl does not exist; name a"),
    "an export that is there": ({"export": "there"}, "error: export is there, which exists"),
    "below a file": ({"export": "bare/config.json/new"}, "error: .*Not a directory.*bare/config"),
    "a run where a model is": ({"out": "bare"}, "error: bare contains a model, .* overwritten"),
    "a long conversation": ({"seq_len": 16}, "error: .* tokens; a row has 16 positions. Pass long"),
    "rows beyond the model": ({"seq_len": 257}, "error: seq_len 257 of the data is above max_seq"),
    "no such option": ({"data.template": '{"x": 0}'}, 'error: the chat template does not read "x"'),
    "four bits without adapters": ({"lora.base": "nf4"}, "error: 'rank' must be >= 1: 0"),
    "a base without a tokenizer": ({"base": "bare"}, "error: bare has no tokenizer that transf"),
}
NO_ADAPTERS = "error: Transformer has no adapters, .* reference=model"
OF_DPO = ("no such option", "an export that is there", "rows beyond the model")
OF_DPO = {name: REFUSED[name] for name in OF_DPO} | {"no adapters": ({"lora.rank": 0}, NO_ADAPTERS)}
CASES = [*(("finetune", case) for case in REFUSED), *(("dpo", case) for case in OF_DPO)]


@pytest.mark.parametrize(("recipe", "case"), CASES)
def test_a_run_that_cannot_be_is_refused_before_it_starts(
    recipe, case, base, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bare"
    for folder in (bare, tmp_path / "there"):
        folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copy(base / name, bare)
    settings, sentence = (REFUSED | OF_DPO)[case]
    with pytest.raises(SystemExit) as stop:
        run_here(recipe, command_line(recipe, base, "run", **settings))
    shown = capsys.readouterr().err
    assert stop.value.code == 2, shown
    assert any(re.match(sentence, line.strip()) for line in shown.splitlines()), shown
    assert not Path("run", "checkpoints").exists()
    assert (bare / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_an_export_that_fails_at_the_end_is_no_finished_run(base, tmp_path, monkeypatch):
    """What is missing is said, nothing that was trained is lost, and the same command goes on."""
    out, tuned = tmp_path / "run", tmp_path / "tuned"
    given = command_line("finetune", base, out, export=tuned, steps=2, **{"lora.rank": 2})
    steps = fk.make_step

    def occupying(*arguments, **options):
        tuned.write_text("mine")
        return steps(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fk, "make_step", occupying)
        with pytest.raises(fk.CheckpointError, match=r"export to .*tuned failed: .* is a file"):
            run_here("finetune", given)
    status = status_of(out)
    assert (status["status"], status["step"]) == ("failed", 2)
    assert re.search(r"export to .*tuned failed: .*is a file.* the same command", status["reason"])
    assert tuned.read_text() == "mine"
    assert saved_step(out) == 2
    tuned.unlink()
    run_here("finetune", given)
    assert status_of(out)["status"] == "finished"
    assert fk.huggingface_spec(tuned) == fk.huggingface_spec(base)
    assert len([row for row in rows_of(out) if "train/loss" in row]) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_goes_on_with_its_own_options_of_the_data_only(recipe, base, tmp_path, capsys):
    given = command_line(recipe, base, tmp_path, steps=1)
    run_here(recipe, given)
    with pytest.raises(SystemExit, match="2"):
        run_here(recipe, [*given, "data.held_out_every=5"])
    assert "other data" in capsys.readouterr().err


def _train(rank, world, recipe, given):
    run_here(recipe, given)


LAYOUTS = {
    "finetune fsdp": ("finetune", 2, LORA),
    "finetune pp": ("finetune", 2, {"mesh.pp": 2, **LORA}),
    "dpo copy": ("dpo", 2, {"reference": "model", "lora.rank": 0}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.oracle] * (n != "finetune fsdp")) for n in LAYOUTS],
)
def test_a_run_moves_to_another_layout(name, base, tmp_path):
    """Begun by one process, ended and exported by several ranks: the losses of one process."""
    recipe, world, settings = LAYOUTS[name]
    alone = {k: v for k, v in settings.items() if not k.startswith("mesh")}
    one, moved = tmp_path / "one", tmp_path / "moved"
    run_here(recipe, command_line(recipe, base, one, export=tmp_path / "a", **alone))
    # As long, so that the rate is the same; then taken back, as if it had been killed after it.
    run_here(recipe, command_line(recipe, base, moved, **alone, eval_every=0))
    assert saved_step(moved) == 6
    for step in (4, 6):
        shutil.rmtree(moved / "checkpoints" / f"step_0000000{step}")
    given = command_line(recipe, base, moved, export=tmp_path / "b", **settings)
    run_ranks(_train, world, recipe, given)
    assert status_of(moved)["status"] == "finished"
    found, losses = (
        {row["step"]: row["train/loss"] for row in results(out) if "train/loss" in row}
        for out in (moved, one)
    )
    assert found == pytest.approx(losses, rel=1e-4)
    wanted, saved = tensors_of(one), tensors_of(moved)
    assert saved.keys() == wanted.keys()
    for key in (key for key in wanted if key.startswith("model.")):
        assert (saved[key] - wanted[key]).abs().max() < 2e-3, key
    start = fk.Transformer(fk.huggingface_spec(tmp_path / "b"))
    fk.load_huggingface(start, tmp_path / "b")


VERIFIED = [
    ("finetune", ["mesh.dp_shard=2", "lora.rank=2"]),
    ("finetune", ["mesh.tp=2"]),
    ("dpo", ["mesh.dp_shard=2"]),
    ("dpo", ["mesh.tp=2", "reference=model", "lora.rank=0", "kind=ipo"]),
]


@pytest.mark.oracle
@pytest.mark.parametrize(("recipe", "settings"), VERIFIED)
def test_the_fine_tuning_recipes_are_exact(recipe, settings, base, tmp_path, capsys):
    given = [f"base={base}", f"data.path={RECIPES[recipe]}", "seq_len=256", f"out={tmp_path}"]
    code = main(["verify", recipe, *given, "global_batch_size=4", "batch_size=1", *settings])
    shown = capsys.readouterr()
    assert code == 0, shown
    (worst,) = re.findall(r"^equal: .* worst (\S+) \(\S+\)$", shown.out, re.M)
    assert 0 < float(worst) < 1e-11, shown.out


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_new_tokens_are_trained_and_exported_with_their_tokenizer(base, tmp_path, capsys):
    import transformers

    chats, out, tuned = tmp_path / "chats.jsonl", tmp_path / "run", tmp_path / "tuned"
    answers = ["<tool>now</tool> it is late", "late <tool>is</tool>"] * 12
    lines = [{"prompt": f"{n} ", "completion": answer} for n, answer in enumerate(answers)]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = command_line("finetune", base, out, export=tuned, steps=4, **{"data.path": chats})
    added = 'new_tokens=["<tool>","</tool>"]'
    run_here("finetune", [*given, added])
    before, after = (transformers.AutoTokenizer.from_pretrained(one) for one in (base, tuned))
    ids = after.encode(answers[0] + " of <tool>", add_special_tokens=False)
    new = [len(before), len(before) + 1]
    assert [id for id in ids if id >= new[0]] == [new[0], new[1], new[0]]
    assert after.decode(ids, skip_special_tokens=True) == answers[0] + " of <tool>"
    opened = transformers.AutoModelForCausalLM.from_pretrained(tuned)
    assert opened.config.vocab_size == len(after) == len(before) + 2
    model, tokenizer, _ = fk.load_run(out)
    assert tokenizer.encode(answers[0]).ids == after.encode(answers[0], add_special_tokens=False)
    row = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(opened(row).logits, model(row), rtol=0, atol=1e-5)
    head = opened.get_output_embeddings().weight
    assert (head[new[0]] - head[new[1]]).abs().max() > 1e-3  # both began at the mean
    assert main(["export", str(out), str(tmp_path / "again")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again.get_output_embeddings().weight, head)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").encode(answers[0]) == (
        after.encode(answers[0])
    )
    end = before.eos_token
    for message, *more in (
        ("adapters do not train the rows of new_tokens. Set lora.rank=0", added, "lora.rank=2"),
        (f"new_tokens has {end!r}, which is empty or in the tokenizer", f'new_tokens=["{end}"]'),
        ("new_tokens has '<a>', which is", 'new_tokens=["<a>","<a>"]'),
        ("new_tokens has '', which is empty", 'new_tokens=[""]'),
    ):
        with pytest.raises(SystemExit):
            run_here("finetune", [*given, *more, f"out={tmp_path / 'new'}", f"export={out}_new"])
        assert message in capsys.readouterr().err
