"""The command line: listing, copying and running recipes, and preparing data."""

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml

from forgekit.cli import main, recipes_folder
from forgekit.data.token_files import open_tokens

VERSION = importlib.metadata.version("forgekit")

TRAIN = '''"""Train a thing.

More about it.
"""

from __future__ import annotations

import sys
from pathlib import Path

settings = Path(__file__).with_suffix(".toml").read_text()

if __name__ == "__main__":
    print(sys.argv[1:], Path(sys.argv[0]).name, settings)
    sys.exit({"--ok": None, "--three": 3, "--words": "went wrong"}.get(sys.argv[-1], 0))
'''


@pytest.fixture
def recipes(tmp_path):
    (folder := tmp_path / "recipes").mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "train.toml").write_text("steps = 3")
    (folder / "train_2_toasters.toml").write_text("# Two toasters.\nsteps = 4\n")
    (folder / "tiny.py").write_text('"""As small as it gets."""\nraise KeyError("broken")\n')
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_cp_writes_a_batch_script_that_runs_and_says_where_it_is_from(here):
    assert main(["cp", "slurm"]) == 0
    lines = (here / "train.sh").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert re.search(r"# Copied from forgekit .* recipes/train.sh \(sha256 \w{8}\)", lines[1])
    assert lines[2] == "# To compare: forgekit diff COPY"
    assert lines[3:] == (recipes_folder() / "slurm" / "train.sh").read_text().splitlines()[1:]


def test_cp_writes_settings_for_a_machine(recipes, here, capsys):
    assert main(["cp", "train_2_toasters.toml", "mine.toml"], recipes=recipes) == 0
    assert tomllib.loads((here / "mine.toml").read_text()) == {"steps": 4}
    assert [path.name for path in here.iterdir()] == ["mine.toml"]
    assert main(["cp", "train_2_toasters", "mine.py"], recipes=recipes) == 2
    assert "mine.py is neither a .toml file nor a folder" in capsys.readouterr().err


TARGETS = {"": "train.py", "new/": "new/train.py", "new/my.py": "new/my.py"}


@pytest.mark.parametrize("target", TARGETS)
def test_cp_writes_the_recipe_and_its_settings(target, recipes, here):
    assert main(["cp", "train", *target.split()], recipes=recipes) == 0
    copy = here / TARGETS[target]
    files = {path for path in here.rglob("*") if path.is_file()}
    assert files == {copy, copy.with_suffix(".toml")}
    assert copy.with_suffix(".toml").read_text() == "steps = 3"
    first, second, rest = copy.read_text().split("\n", 2)
    digest = hashlib.sha256(TRAIN.encode()).hexdigest()[:8]
    assert first == f"# Copied from forgekit {VERSION} recipes/train.py (sha256 {digest})."
    assert (second, rest) == ("# To compare: forgekit diff COPY", TRAIN)
    assert ast.get_docstring(ast.parse(copy.read_text())).startswith("Train a thing.")


@pytest.mark.parametrize("existing", ["my.py", "my.toml"])
def test_cp_overwrites_only_when_forced(existing, recipes, here, capsys):
    (here / existing).write_text("mine")
    assert main(["cp", "train", "my.py"], recipes=recipes) == 2
    assert f"{existing} would be overwritten; --force allows it." in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == [existing], "half a copy was left"
    assert (here / existing).read_text() == "mine"
    assert main(["cp", "train", "my.py", "--force"], recipes=recipes) == 0
    assert (here / existing).read_text() != "mine"


def test_an_unknown_recipe_gets_the_nearest_and_the_list(recipes, here, capsys):
    assert main(["cp", "trian"], recipes=recipes) == 2
    message = "forgekit: no recipe 'trian'; the nearest is 'train'. The recipes are tiny, train.\n"
    assert capsys.readouterr().err == message


ENDS = [
    (["--ok"], None),
    (["--three"], 3),
    (["--version", "--", "--lr", "-1"], 0),
    (["--words"], "went wrong"),
]


@pytest.mark.parametrize(("arguments", "code"), ENDS)
def test_run_passes_arguments_exit_code_and_exceptions_through(arguments, code, recipes, capsys):
    before = list(sys.argv)
    with pytest.raises(SystemExit) as stop:
        main(["run", "train", *arguments], recipes=recipes)
    assert stop.value.code == code
    assert capsys.readouterr().out == f"{arguments} train.py steps = 3\n"
    with pytest.raises(KeyError, match="broken"):
        main(["run", "tiny"], recipes=recipes)
    assert sys.argv == before


@pytest.fixture
def texts(tmp_path):
    (folder := tmp_path / "texts").mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"the cat and the dog, {number} times\n" * 50)
    return folder


def test_prepare_says_where_things_are_and_how_big(texts, here, capsys):
    arguments = ["--out", "tokens", "--vocab", "300", "--held-out-every", "5"]
    assert main(["prepare", str(texts), *arguments]) == 0
    shown = capsys.readouterr()
    train, held_out = open_tokens("tokens"), open_tokens("tokens/heldout")
    assert (train.documents, held_out.documents) == (8, 2)
    each = train.metadata["text_bytes"] / train.tokens
    size = f"8 documents, {train.tokens:,} tokens, {each:.2f} bytes per token"
    first, second, third = shown.out.splitlines()
    assert first == f"training   tokens  {size}"
    assert second.startswith("held out   tokens/heldout  2 documents, ")
    assert third == f"tokenizer  tokens/tokenizer.json  {train.vocab_size} tokens"
    assert shown.err == "part 1 of the tokens is written\n"
    assert main(["prepare", str(texts), *arguments]) == 0
    again = "tokens was made from the same files before and stays unchanged."
    assert capsys.readouterr().out.splitlines()[0] == again


def test_prepare_reads_other_keys_and_columns_and_leaves_out_what_is_broken(here, capsys):
    from datasets import Dataset

    rows = [{"body": f"the cat and the dog, {number} times"} for number in range(40)]
    lines = [json.dumps(row) for row in rows]
    Path("a.jsonl").write_text("\n".join([*lines[:7], "{", *lines[7:], "[]"]))
    Dataset.from_list(rows).to_parquet("b.parquet")
    arguments = ["--out", "tokens", "--vocab", "300", "--text-key", "body"]
    assert main(["prepare", "a.jsonl", "b.parquet", *arguments]) == 2
    assert "a.jsonl:8 cannot be read as JSON" in capsys.readouterr().err
    assert main(["prepare", "a.jsonl", "b.parquet", *arguments, "--skip-broken"]) == 0
    assert (open_tokens("tokens").documents, open_tokens("tokens/heldout").documents) == (76, 4)
    left_out = "left out   2 broken documents; index.json names the first"
    assert capsys.readouterr().out.splitlines()[-1] == left_out


def test_prepare_uses_a_tokenizer_that_is_given(texts, here, capsys):
    assert main(["prepare", str(texts), "--out", "train", "--vocab", "300"]) == 0
    assert capsys.readouterr().err == "part 1 of the tokens is written\n"
    own = ["--tokenizer", "train/tokenizer.json"]
    assert main(["prepare", str(texts), "--out", "test", *own]) == 0
    assert open_tokens("test").vocab_size == open_tokens("train").vocab_size
    assert main(["prepare", str(texts), "--out", "c", *own, "--eos-token", "</s>"]) == 2
    assert "no token '</s>'; its special tokens are \"<|endoftext|>\"" in capsys.readouterr().err


def test_prepare_that_is_interrupted_says_that_it_can_go_on(texts, here, monkeypatch):
    tell = mock.Mock(side_effect=[KeyboardInterrupt, None])
    monkeypatch.setattr("forgekit.cli.prepare.tell", tell)
    assert main(["prepare", str(texts), "--out", "tokens", "--vocab", "300"]) == 1
    tell.assert_called_with("forgekit: interrupted; the same command continues from here.")


@pytest.mark.parametrize("name", sorted(path.stem for path in recipes_folder().glob("*.py")))
def test_each_recipe_has_help(name, here, capsys):
    with contextlib.suppress(SystemExit):
        assert main(["run", name, "--help"]) == 0
    shown = capsys.readouterr()
    assert "usage: " in shown.out
    assert (shown.err, list(here.iterdir())) == ("", [])


FULL = "forgekit: stdout cannot be written: No space left on device.\n"


@pytest.mark.parametrize(
    ("redirection", "code", "shown"),
    [(">/dev/full", 1, FULL), ("| head -n 0; exit ${PIPESTATUS[0]}", 0, "")],
)
def test_a_list_that_nobody_gets_is_an_error_unless_the_reader_left(redirection, code, shown):
    command = ["bash", "-c", f"{sys.executable} -m forgekit ls {redirection}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, shown)


def test_what_computes_nothing_takes_0_3_seconds_of_cpu_at_most():
    """Of CPU, the least of up to ten: on a busy machine a process may need twice what it needs."""
    seconds = []
    while not seconds or (min(seconds) > 0.3 and len(seconds) < 10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "forgekit", "ls"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert 0 < min(seconds) <= 0.3, seconds


def test_there_are_real_recipes_that_can_be_copied(here, capsys):
    paths = sorted(recipes_folder().glob("*.*"), key=lambda path: path.stem)
    paths = [path for path in paths if path.is_file()]
    assert main(["ls"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    paths += recipes_folder().glob("launchers/*.*")
    names = [path.stem for path in paths]
    assert [*lines] == sorted([*names, "slurm"])
    for path, name in zip(paths, names, strict=True):
        assert len(lines[name].split()) > 2, f"{name} does not say what it is"
        assert main(["cp", name]) == 0
        copy = (here / path.name).read_text()
        assert copy.startswith(f"# Copied from forgekit {VERSION} recipes/{path.name} (sha256 ")
        if path.suffix == ".py":
            assert ast.get_docstring(compile(copy, name, "exec", flags=ast.PyCF_ONLY_AST))
        else:
            assert yaml.safe_load(copy) if path.suffix == ".yaml" else tomllib.loads(copy)
