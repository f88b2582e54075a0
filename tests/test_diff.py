"""Comparing a copied recipe with its origin, before and after the origin has changed."""

import codecs
import shlex
import subprocess

import pytest

from forgekit.cli import main
from forgekit.cli.recipes import VERSION, digest_of

FIRST = '''"""Train a thing."""

STEPS = 10
WIDTH = 64
DEPTH = 2


def main():
    print("train", STEPS, WIDTH, DEPTH)


main()
'''
LATER = FIRST.replace('print("train",', 'print("training",')
"""What a later version made of it: far enough from a changed STEPS to merge."""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A folder of recipes, and a copy of one in the working folder."""
    folder = tmp_path / "recipes"
    for name in ("recipes", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (folder / "train.py").write_text(FIRST)
    assert main(["cp", "train", "my.py"], recipes=folder) == 0
    return folder


def diff(recipes, *arguments):
    return main(["diff", "my.py", *arguments], recipes=recipes)


def mine(recipes):
    return recipes.parent / "here" / "my.py"


def test_both_changes_are_shown_and_git_merges_them_as_it_says(recipes, tmp_path, capsys):
    """The recipe as it was lies beside a later one with the same name."""
    (tmp_path / "first.py").write_text(FIRST)
    later(recipes)
    mine(recipes).write_text(mine(recipes).read_text().replace("STEPS = 10", "STEPS = 500"))
    before = mine(recipes).read_bytes()
    capsys.readouterr()
    assert diff(recipes, "--origin", str(tmp_path / "first.py")) == 0
    said = capsys.readouterr().out
    assert f"my.py was copied from recipes/train.py of forgekit {VERSION}.\n" in said
    assert "What my.py changed: +1 -1 lines\n" in said
    assert "\n-STEPS = 10\n+STEPS = 500\n" in said
    assert "Copied from" not in said
    assert "changed since: +1 -1 lines\n" in said
    assert '\n-    print("train", STEPS' in said
    assert mine(recipes).read_bytes() == before
    (merge,) = (line for line in said.splitlines() if line.startswith("To merge both: "))
    subprocess.run(shlex.split(merge.removeprefix("To merge both: ")), check=True)
    first, second, text = mine(recipes).read_text().split("\n", 2)
    assert text == LATER.replace("STEPS = 10", "STEPS = 500")
    assert f"(sha256 {digest_of(LATER)})" in said
    mine(recipes).write_text(
        f"{first.replace(digest_of(FIRST), digest_of(LATER))}\n{second}\n{text}"
    )
    assert diff(recipes) == 0
    assert "changed since: nothing\n" in capsys.readouterr().out


def test_line_ends_that_an_editor_gave_a_copy_are_no_change(recipes, capsys):
    dos = mine(recipes).read_bytes().replace(b"STEPS = 10", b"STEPS = 500").replace(b"\n", b"\r\n")
    mine(recipes).write_bytes(codecs.BOM_UTF8 + dos)
    capsys.readouterr()
    assert diff(recipes) == 0
    assert "What my.py changed: +1 -1 lines\n" in capsys.readouterr().out


def unstamped(recipes):
    mine(recipes).write_text(FIRST)
    return "no line '# Copied from forgekit ...' at its top, so its recipe is unknown."


def gone(recipes):
    (recipes / "train.py").unlink()
    return f"but forgekit {VERSION} has no such recipe."


def later(recipes):
    (recipes / "train.py").write_text(LATER)
    return f"`pip download --no-deps forgekit=={VERSION}`, unzip it) and pass it with --origin."


@pytest.mark.parametrize("change", [unstamped, gone, later])
def test_what_cannot_be_compared_says_why(change, recipes, capsys):
    message = change(recipes)
    assert diff(recipes) == 2
    assert message in capsys.readouterr().err
