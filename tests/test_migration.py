"""The pages for users of other trainers: what they name on our side exists."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
from runs import load_recipe

from forgekit.cli.program import main
from forgekit.config import keys_of

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "migration").glob("*.md")}
TRAINERS = sorted(PAGES.keys() - {"index"})


def ours(page):
    """What stands in code in the right column of a page's table."""
    rows = re.findall(r"^\|(?!---)(.*)\|(.*)\|$", PAGES[page], re.M)[1:]
    return [code for _, cell in rows for code in re.findall(r"(?<!\})`([^`]+)`", cell)]


@functools.cache
def words():
    sources = (path for folder in ("forgekit", "recipes") for path in (ROOT / folder).rglob("*.py"))
    return set(re.findall(r"\w+", "".join(path.read_text() for path in sources)))


@functools.cache
def pretrain_keys():
    return {name for name, *_ in keys_of(load_recipe("pretrain").Config)}


def find(path):
    module, *names = path.replace("fk.", "forgekit.", 1).split(".")
    thing = importlib.import_module(module)
    for name in names:
        thing = getattr(thing, name)
    return thing


def check(code):
    """Raise unless a name, call, key, command or file of ours exists."""
    if re.match(r"(fk|forgekit)\.", code):
        tree = ast.parse(code, mode="eval").body
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            options = {option.arg: None for option in call.keywords}
            inspect.signature(find(ast.unparse(call.func))).bind_partial(*call.args, **options)
        if not isinstance(tree, ast.Call):
            find(code)
    elif code.startswith("forgekit "):
        with pytest.raises(SystemExit) as ended:
            main([code.split()[1], "--help"])
        assert ended.value.code == 0, code
    elif code.startswith("recipes/"):
        assert (ROOT / code).exists(), code
    elif key := re.match(r"([\w.]+)=", code):
        assert key[1] in pretrain_keys(), code
    else:
        assert set(re.findall(r"[A-Za-z_]\w*", code)) <= words(), code


@pytest.mark.parametrize("page", TRAINERS)
def test_what_a_page_names_on_our_side_exists(page, capsys):
    codes = ours(page)
    assert len(codes) > 30
    for code in codes:
        check(code)


def test_a_name_that_is_not_there_is_found():
    for code in ("fk.no_such_name", "fk.clip(totals, norm=1)", "mesh.xp=", "no_word_ours"):
        with pytest.raises((AttributeError, TypeError, AssertionError)):
            check(code)
