"""Comparing a copied recipe with its origin, before and after the origin has changed."""

import codecs
import subprocess

import pytest

from forgekit.cli import main
from forgekit.cli.recipe_origin import VERSION, digest_of, read_stamp

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
    """A folder of recipes, an empty working folder and an empty cache."""
    folder = tmp_path / "recipes"
    for name in ("recipes", "here", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "train.py").write_text(FIRST)
    assert main(["cp", "train", "my.py"], recipes=folder) == 0
    return folder


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def diff(recipes, *arguments):
    return main(["diff", "my.py", *arguments], recipes=recipes)


def mine(recipes):
    return recipes.parent / "here" / "my.py"


def test_what_a_copy_changed_is_shown_without_its_stamp(recipes, capsys):
    edit(mine(recipes), "STEPS = 10", "STEPS = 500")
    capsys.readouterr()
    assert diff(recipes) == 0
    said = capsys.readouterr().out
    assert f"my.py was copied from recipes/train.py of forgekit {VERSION}.\n" in said
    assert "What my.py changed: +1 -1 lines\n" in said
    assert "\n-STEPS = 10\n+STEPS = 500\n" in said
    assert "Copied from" not in said
    assert said.endswith(f"What forgekit {VERSION} changed since: nothing\n")


def test_what_the_origin_changed_since_is_shown_and_nothing_is_written(recipes, capsys):
    edit(mine(recipes), "STEPS = 10", "STEPS = 500")
    (recipes / "train.py").write_text(LATER)
    before = mine(recipes).read_bytes()
    capsys.readouterr()
    assert diff(recipes) == 0
    said = capsys.readouterr().out
    assert "changed since: +1 -1 lines\n" in said
    assert '\n-    print("train", STEPS' in said
    assert said.endswith("To merge both: forgekit diff --merge my.py\n")
    assert mine(recipes).read_bytes() == before
    assert [path.name for path in mine(recipes).parent.iterdir()] == ["my.py"]


def test_both_changes_are_merged_and_the_next_comparison_starts_there(recipes, capsys):
    edit(mine(recipes), "STEPS = 10", "STEPS = 500")
    mine(recipes).chmod(0o750)
    before = mine(recipes).read_bytes()
    (recipes / "train.py").write_text(LATER)
    assert diff(recipes, "--merge") == 0
    origin, text = read_stamp(mine(recipes).read_bytes())
    assert text.decode() == LATER.replace("STEPS = 10", "STEPS = 500")
    assert origin.digest == digest_of(LATER.encode())
    assert mine(recipes).stat().st_mode & 0o777 == 0o750
    assert mine(recipes).with_name("my.py.orig").read_bytes() == before
    capsys.readouterr()
    assert diff(recipes) == 0
    said = capsys.readouterr().out
    assert "What my.py changed: +1 -1 lines\n" in said
    assert "changed since: nothing\n" in said


def test_a_conflict_is_marked_with_all_three_texts_and_counted(recipes, capsys):
    edit(mine(recipes), "STEPS = 10", "STEPS = 500")
    (recipes / "train.py").write_text(FIRST.replace("STEPS = 10", "STEPS = 20"))
    assert diff(recipes, "--merge") == 1
    assert "my.py has 1 conflict, between <<<<<<< and >>>>>>>" in capsys.readouterr().err
    _, text = read_stamp(mine(recipes).read_bytes())
    lines = text.decode().splitlines()
    first = lines.index("<<<<<<< my.py")
    assert lines[first + 1] == "STEPS = 500"
    assert lines[first + 3] == "STEPS = 10"
    assert lines[first + 5] == "STEPS = 20"


def test_a_script_with_a_first_line_for_the_shell_is_merged_below_it(recipes):
    (recipes / "job.sh").write_text("#!/bin/bash\n# A job.\necho one\n\n\n\n\necho two\n")
    (recipes / "job").mkdir()
    (recipes / "job.sh").rename(recipes / "job" / "job.sh")
    copy = mine(recipes).with_name("job.sh")
    assert main(["cp", "job"], recipes=recipes) == 0
    edit(copy, "echo one", "echo three")
    edit(recipes / "job" / "job.sh", "echo two", "echo four")
    assert main(["diff", "job.sh", "--merge"], recipes=recipes) == 0
    lines = copy.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[1].startswith("# Copied from forgekit")
    assert lines[3:] == ["# A job.", "echo three", "", "", "", "", "echo four"]
    done = subprocess.run(["bash", copy], capture_output=True, text=True, check=True)
    assert done.stdout == "three\nfour\n"


def test_the_text_it_was_copied_from_can_be_named(recipes, tmp_path, capsys):
    (recipes / "train.py").write_text(LATER)
    for kept in (tmp_path / "cache").rglob("*"):
        if kept.is_file():
            kept.write_bytes(b"damaged")
    assert diff(recipes) == 2
    said = capsys.readouterr().err
    assert "the text that my.py was copied from is not in this user's cache. Get it (`pip" in said
    (tmp_path / "first.py").write_text(FIRST)
    assert diff(recipes, "--origin", str(tmp_path / "first.py")) == 0
    assert "What my.py changed: nothing" in capsys.readouterr().out


def test_a_copy_without_its_first_lines_is_compared_with_the_recipe_that_is_named(recipes, capsys):
    mine(recipes).write_text(FIRST.replace("STEPS = 10", "STEPS = 500"))
    (recipes / "train.py").write_text(LATER)
    assert diff(recipes, "--recipe", "train") == 0
    said = capsys.readouterr().out
    assert f"my.py is compared with recipes/train.py of forgekit {VERSION}.\n" in said
    assert "What my.py changed: +2 -2 lines\n" in said
    assert said.endswith("changed since: nothing\n")


def test_a_copy_without_its_first_lines_is_merged_from_the_text_that_is_named(
    recipes, tmp_path, capsys
):
    (tmp_path / "then.py").write_text(FIRST)
    mine(recipes).write_text(FIRST.replace("STEPS = 10", "STEPS = 500"))
    (recipes / "train.py").write_text(LATER)
    named = ["--recipe", "train", "--origin", str(tmp_path / "then.py")]
    assert diff(recipes, *named, "--merge") == 0
    assert "my.py is compared with then.py.\n" in capsys.readouterr().out
    origin, text = read_stamp(mine(recipes).read_bytes())
    assert text.decode() == LATER.replace("STEPS = 10", "STEPS = 500")
    assert origin.digest == digest_of(LATER.encode())


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_copy_keeps_the_line_ends_that_an_editor_gave_it(mark, recipes, capsys):
    dos = mine(recipes).read_bytes().replace(b"STEPS = 10", b"STEPS = 500").replace(b"\n", b"\r\n")
    mine(recipes).write_bytes(mark + dos)
    capsys.readouterr()
    assert diff(recipes) == 0
    assert "What my.py changed: +1 -1 lines\n" in capsys.readouterr().out
    (recipes / "train.py").write_text(LATER)
    assert diff(recipes, "--merge") == 0
    merged = mine(recipes).read_bytes()
    assert merged.count(b"\n") == merged.count(b"\r\n") == dos.count(b"\n")
    _, text = read_stamp(merged.replace(b"\r\n", b"\n"))
    assert text.decode() == LATER.replace("STEPS = 10", "STEPS = 500")


def test_a_cache_that_cannot_be_written_does_not_keep_a_recipe_from_being_copied(
    recipes, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["cp", "train", "other.py"], recipes=recipes) == 0
    assert main(["diff", "other.py"], recipes=recipes) == 0


def unstamped(recipes, tmp_path):
    mine(recipes).write_text(FIRST)
    return [], "Name the recipe with --recipe; `forgekit ls` shows them."


def stamped_and_named(recipes, tmp_path):
    said = "my.py says that it was copied from recipes/train.py; leave out --recipe."
    return ["--recipe", "train"], said


def unknown(recipes, tmp_path):
    mine(recipes).write_text(FIRST)
    return ["--recipe", "trian"], "no recipe 'trian'; the nearest is 'train'. There are: train."


def gone(recipes, tmp_path):
    (recipes / "train.py").unlink()
    return [], f"forgekit {VERSION} has no such recipe; `forgekit ls` shows those it has."


def another(recipes, tmp_path):
    (tmp_path / "other.py").write_text(LATER)
    digests = [digest_of(text.encode()) for text in (LATER, FIRST)]
    said = "has sha256 {}, and my.py was copied from a file with {}.".format(*digests)
    return ["--origin", str(tmp_path / "other.py")], said


def in_the_way(recipes, tmp_path):
    (recipes / "train.py").write_text(LATER)
    mine(recipes).with_name("my.py.orig").write_text("kept")
    return ["--merge"], "my.py.orig would be overwritten by the text before the merge; move it."


def empty(recipes, tmp_path):
    mine(recipes).write_text("")
    return [], "my.py is empty; name a file that `forgekit cp` wrote."


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "case", [unstamped, stamped_and_named, unknown, gone, another, in_the_way, empty]
)
def test_what_cannot_be_compared_is_refused_and_nothing_is_written(case, recipes, tmp_path, capsys):
    arguments, message = case(recipes, tmp_path)
    before = mine(recipes).read_bytes()
    assert diff(recipes, *arguments) == 2
    assert message in capsys.readouterr().err
    assert mine(recipes).read_bytes() == before


@pytest.mark.bad_input
def test_what_cannot_be_written_says_so(recipes, capsys):
    copy = mine(recipes).rename(mine(recipes).with_name(f"{'a' * 249}.py"))  # .orig is too long
    (recipes / "train.py").write_text(LATER)
    assert main(["diff", copy.name, "--merge"], recipes=recipes) == 2
    said = capsys.readouterr().err
    assert said.startswith("forgekit: nothing was written, aaa")
    assert said.endswith("aaa.py.orig: File name too long.\n")


@pytest.mark.bad_input
def test_merging_without_git_writes_nothing(recipes, monkeypatch, capsys):
    (recipes / "train.py").write_text(LATER)
    monkeypatch.setenv("PATH", "")
    before = mine(recipes).read_bytes()
    assert diff(recipes, "--merge") == 2
    said = capsys.readouterr().err
    assert "merging needs git, which is not installed; nothing was written." in said
    assert mine(recipes).read_bytes() == before
