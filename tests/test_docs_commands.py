"""Commands, options, recipes, keys and names in the README and the documentation exist."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import runpy
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import forgekit
from forgekit.cli import main
from forgekit.cli.recipes import recipe_or_settings
from forgekit.cli.usage import UsageError
from forgekit.config import keys_of, load_config
from forgekit.mesh import resolve_sizes

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
PAGES = {str(p.relative_to(ROOT)): p for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
OF_SLURM = "cpus-per-task dependency kill-on-bad-exit nodes ntasks-per-node open-mode requeue"
OF_LIGHTHOUSE = "heartbeat_timeout_ms join_timeout_ms"
OTHERS = {f"--{name}" for name in f"{OF_SLURM} {OF_LIGHTHOUSE} config help signal wait".split()}
"""Options of sbatch and srun, and of the lighthouse, which other tests start with them."""


def lines_of(text):
    """What a page tells the reader to type: lines of its blocks, and code that begins with us."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    shells = [block for name, block in blocks if name in ("", "bash", "console", "sh", "text")]
    typed = "\n".join(shells).replace("\\\n", " ")
    starts = r"^(?:\$ )?((?:forgekit|python|torchrun|sbatch) .*?)(?:  +#.*)?$"
    yield from re.findall(starts, typed, re.M)
    yield from re.findall(r"`(forgekit [a-z][^`]*)`", text)


def recipe_of(script, text):
    """The recipe that a script is, or was copied from on this page."""
    if script.name == "my.py":
        copied = re.search(r"forgekit cp (\w+) my\.py", text)
        return recipe_or_settings(RECIPES, copied[1] if copied else "pretrain")
    return RECIPES / f"{script.stem}.py"


@functools.cache
def config_of(recipe):
    return runpy.run_path(str(recipe), run_name="set_up")["Config"]


def check_keys(recipe, words):
    """Read keys and values as the recipe does; settings are files beside the recipes."""
    given = [word for word in words if "=" in word or word == "--config"]
    given += [str(RECIPES / word) for word in words if word.endswith(".toml")]
    load_config(config_of(recipe), given)


def help_of(command, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0, command
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", capsys.readouterr().out))


def check_line(line, text, capsys):
    """Raise unless what a line names exists."""
    program, *words = shlex.split(line)
    if program != "forgekit":
        at = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
        if at is not None:
            check_keys(recipe_of(Path(words[at]), text), words[at + 1 :])
        return
    command, *rest = words
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert options <= help_of(command, capsys), line
    names = [word for word in rest if not word.startswith("--") and "=" not in word]
    if command == "cp":
        assert recipe_or_settings(RECIPES, names[0]).exists(), line
    if command in ("run", "plan", "verify") and names:
        keys = [word for word in rest if not word.startswith("--")]
        check_keys(recipe_of(Path(names[0]), text), keys)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_to_type_exists(page, capsys):
    text = PAGES[page].read_text()
    for line in lines_of(text):
        if line != "forgekit COMMAND --help":
            check_line(line, text, capsys)


def test_a_line_that_does_not_work_is_found(capsys):
    wrong = "forgekit report runs/a --outer", "forgekit cp pretrained my.py", "python my.py a=1"
    for line in wrong:
        with pytest.raises((AssertionError, SystemExit, UsageError)):
            check_line(line, "", capsys)


def test_options_in_the_text_exist(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.search(r"^  COMMAND\n((?:    .*\n)+)", capsys.readouterr().out, re.M)[1]
    ours = {f for name in re.findall(r"^    (\w+)", commands, re.M) for f in help_of(name, capsys)}
    launcher = set(re.findall(r"--[a-z][\w-]*", get_args_parser().format_help()))
    known = ours | launcher | OTHERS
    for page, path in PAGES.items():
        spans = re.findall(r"`(--[a-z][^`]*)`", path.read_text())
        if not page.startswith("docs/migration"):  # which name the options of others
            found = {flag for span in spans for flag in re.findall(r"(?<!\S)--[\w.-]+", span)}
            check_keys(RECIPES / "pretrain.py", [f"{f}=1e-4" for f in found if "." in f])
            assert {flag for flag in found if "." not in flag} <= known, page


def several_ranks():
    """Lines of the README, of pages, recipes and their settings that start several ranks.

    Returns:
        By place and line: the recipe, the number of ranks, and what the recipe is given.
    """
    files = [*PAGES.values(), *RECIPES.glob("*.py"), *RECIPES.glob("*.toml")]
    found = {}
    for path in [*files, *(ROOT / "forgekit").rglob("*.py")]:
        text = path.read_text()
        typed = text.replace("\\\n", " ")
        for line in re.findall(r"((?:torchrun|srun) [^`|\n]*\.py\b[^`|\n]*)", typed):
            words = [w for w in shlex.split(line.partition("  #")[0]) if w != "&"]
            at = next(n for n, word in enumerate(words) if word.endswith(".py"))
            if (script := Path(words[at])).name != "recipe.py":  # which stands for any
                rest = [str(RECIPES / w) if w.endswith(".toml") else w for w in words[at + 1 :]]
                name = f"{path.relative_to(ROOT)}: {' '.join(words)}"
                world = ranks_of(" ".join(words[:at]))
                found[name] = recipe_of(script, text), world, rest
    return found


def ranks_of(launcher):
    """How many ranks a launcher starts; srun that is not told so on a node of eight GPUs."""
    sizes = re.findall(r"(?:--nproc-per-node|--ntasks-per-node|-N|--nnodes)[= ](\d+)", launcher)
    return math.prod(map(int, sizes)) if sizes else 8


@pytest.mark.parametrize("line", SEVERAL := several_ranks())
def test_the_mesh_of_a_line_for_several_ranks_fits_them(line):
    """And its batch: the set-up of each recipe in a layout is planned by other tests."""
    recipe, world, words = SEVERAL[line]
    config = load_config(config_of(recipe), words)
    if hasattr(config, "mesh"):
        stages, replicate, shard, context, _ = resolve_sizes(config.mesh, world)
        ranks = stages * replicate * shard  # a stage each takes part in as many micro-batches
        assert shard * context % config.mesh.ep == 0
        if hasattr(config, "global_batch_size"):
            assert config.global_batch_size % ((config.batch_size or 1) * ranks) == 0


# Pages for users of other trainers: what they name on our side exists

TRAINERS = [page for page in PAGES if "migration/" in page and "index" not in page]


def ours(page):
    """What stands in code in the right column of a page's table."""
    rows = re.findall(r"^\|(?!---)(.*)\|(.*)\|$", PAGES[page].read_text(), re.M)[1:]
    return [code for _, cell in rows for code in re.findall(r"(?<!\})`([^`]+)`", cell)]


@functools.cache
def names_of_ours():
    """All words of the package and the recipes, and the keys of pretrain."""
    sources = (path for folder in ("forgekit", "recipes") for path in (ROOT / folder).rglob("*.py"))
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in sources)))
    return words, {name for name, *_ in keys_of(config_of(RECIPES / "pretrain.py"))}


def find(name):
    return functools.reduce(getattr, name.split(".")[1:], forgekit)


def check_calls(code):
    """Raise unless our functions take the arguments with which they are called."""
    for call in [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]:
        if re.fullmatch(r"(fk|forgekit)(\.\w+)+", name := ast.unparse(call.func)):
            given = [value for value in call.args if ast.unparse(value) != "..."]
            options = {option.arg: None for option in call.keywords if option.arg}
            inspect.signature(find(name)).bind_partial(*given, **options)


def check_code(code, capsys):
    """Raise unless a name, call, key, command or file of ours exists."""
    words, keys = names_of_ours()
    if name := re.match(r"(?:fk|forgekit)(?:\.\w+)+", code):
        find(name[0])
        check_calls(code)
    elif code.startswith("forgekit "):
        help_of(code.split()[1], capsys)
    elif code.startswith("recipes/"):
        assert (ROOT / code).exists(), code
    elif key := re.match(r"([\w.]+)=", code):
        assert key[1] in keys, code
    else:
        assert set(re.findall(r"[A-Za-z_]\w*", code)) <= words, code


@pytest.mark.parametrize("page", TRAINERS)
def test_what_a_page_names_on_our_side_exists(page, capsys):
    codes = ours(page)
    assert len(codes) > 30
    for code in codes:
        check_code(code, capsys)


def test_a_name_that_is_not_there_is_found(capsys):
    for code in ("fk.no_such_name", "fk.clip(totals, norm=1)", "mesh.xp=", "no_word_ours"):
        with pytest.raises((AttributeError, TypeError, AssertionError)):
            check_code(code, capsys)
