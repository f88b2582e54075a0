"""The public face: what the contract names is there, documented, and cheap to import.

``.ci/run`` runs what starts processes or builds the wheel; ``make oracle`` does, too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import stub
from covering import some_of

import forgekit as fk

ROOT = Path(fk.__file__).parent
OPTIONAL = (
    *("tokenizers", "matplotlib", "transformers", "datasets"),
    *("pyarrow", "wandb", "pandas", "redis"),
)
TESTING = ("pytest", "hypothesis", "oracle", "ranks", "tests", "conftest")


ROOMS = [path.parent.name for path in sorted(ROOT.glob("*/__init__.py"))]


def names_of(room):
    """What a room's table of contents lists: each as ``from ... import name as name``."""
    lines = [node for node in _tree(ROOT / room / "__init__.py").body if hasattr(node, "names")]
    return [alias.name for line in lines for alias in line.names if alias.asname == alias.name]


def test_public_names_are_there_and_documented_and_each_in_one_room():
    public = [(fk, name) for name in fk.__all__]
    public += [(getattr(fk, room), name) for room in ROOMS for name in names_of(room)]
    assert len({name for _, name in public}) == len(public) > 150
    for room, name in public:
        thing = getattr(room, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            summary = (thing.__doc__ or "").strip().split("\n")[0]
            # Where there is no docstring dataclasses write "Name(field, ...)".
            assert len(summary) > 15, name
            assert not summary.startswith(f"{name}("), name


def test_the_top_is_small_and_names_of_rooms_that_were_flat_go_on_working():
    assert len(fk.__all__) <= 50
    assert {"pack", "KL", "Part", "OneGroup", "every", "rex", "constant"}.isdisjoint(dir(fk))
    assert fk.grpo_loss is fk.rollouts.grpo_loss
    for name, room in fk._ROOMS.items():
        assert name not in dir(fk), name
        assert getattr(fk, name) is getattr(getattr(fk, room), name), name


@functools.cache
def _tree(path):
    return ast.parse(path.read_text())


def _imports(path):
    """Each imported module with the names that are taken from it, at any depth of the file."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", tuple(alias.name for alias in node.names)


def test_what_type_checkers_see_is_what_is_imported():
    assert stub.STUB.read_text() == stub.text(), "python tests/stub.py writes it anew"


def test_no_module_takes_the_name_of_a_public_function():
    """A folder or file that is imported becomes an attribute of the one above it."""
    for module in pkgutil.walk_packages([str(ROOT)], "forgekit."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    public = [(getattr(fk, room), name) for room in ROOMS for name in names_of(room)]
    public += [(fk, name) for name in (*fk.__all__, *fk._ROOMS)]
    assert not [name for room, name in public if inspect.ismodule(getattr(room, name))]


_ALL = "from forgekit import *; import sys; print(*{n.partition('.')[0] for n in sys.modules})"


@pytest.mark.oracle
def test_all_public_names_are_imported_silently_and_extras_wait():
    """What the import costs is measured by a benchmark, beside the libraries that it needs."""
    command = [sys.executable, "-W", "error::DeprecationWarning:forgekit", "-c", _ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = set(done.stdout.split())
    assert "forgekit" in loaded
    assert loaded.isdisjoint({*OPTIONAL, *TESTING})


_COMMAND = """
import sys
from forgekit.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("words", some_of(["--help", "cp pretrain", "diff --help"], "--help"))
def test_a_command_that_computes_nothing_starts_without_torch(words, tmp_path):
    command = [sys.executable, "-c", _COMMAND, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "forgekit" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "tensordict", "safetensors", *OPTIONAL})


def test_recipes_use_public_names_alone():
    recipes = sorted((ROOT.parent / "recipes").glob("*.py"))
    assert recipes
    for path in recipes:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fk":
                public = node.attr in (*dir(fk), *fk._ROOMS)
                assert public, (path.name, node.attr)
        for module, names in _imports(path):
            if module.startswith("forgekit"):
                room = module.removeprefix("forgekit.")
                public = names_of(room) if room in ROOMS else fk.config.__all__
                assert room in (*ROOMS, "forgekit", "config"), (path.name, module)
                assert room == "forgekit" or set(names) <= set(public), (path.name, names)
            assert not module.startswith("recipes"), path.name


@pytest.mark.oracle
def test_the_wheel_carries_recipes_and_types(tmp_path):
    """An installed forgekit has the recipes to copy, although they stand beside the package."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("forgekit-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    folder = ROOT.parent / "recipes"
    shipped = [*folder.glob("*.*"), *folder.glob("examples/*")]
    assert {path.suffix for path in shipped if path.is_file()} == {".py", ".toml", ".jsonl"}
    recipes = {f"forgekit/recipes/{p.relative_to(folder)}" for p in shipped if p.is_file()}
    assert recipes | {"forgekit/py.typed", "forgekit/steps/accumulate.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "recipes/", "benchmarks/"))]
