"""What the documentation shows comes from the code: pictures, examples, the table of layouts."""

from __future__ import annotations

import doctest
import math
import re
from pathlib import Path

import floors
import pytest
import torch
from distributed.matrix import LAYOUTS
from lazy_clock import simulate
from runs import launch
from test_docs_commands import check_calls, find

import forgekit as fk

DOCS = Path(__file__).parents[1] / "docs"


def blocks_of(page, kind="python"):
    """Blocks of code of a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")))


@pytest.mark.oracle
def test_pictures_are_drawn_from_the_code(tmp_path):
    target = tmp_path / "pictures"
    target.mkdir()
    with launch(DOCS / "pictures.py", [str(target)], log=tmp_path / "log") as job:
        assert job.end() == 0, job.output
    drawn = {path.name: path for path in target.iterdir()}
    assert drawn.keys() == {path.name for path in (DOCS / "pictures").iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    shown = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert all(f"(pictures/{name})" in shown for name in drawn)


EXAMPLES = {"data": 40, "huggingface": 20, "porting": 15, "heads": 20, "server": 15}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_page_run(name, tmp_path, monkeypatch):
    """One after the other, in an empty folder: each goes on where the one before it ended."""
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(f"{name}.md", "pycon")
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, name, None, 0)
    said = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=said.append)
    assert result.attempted > EXAMPLES[name]
    assert result.failed == 0, "".join(said)


SCRIPTS = [("adapters.md", 0.5, "adapter/adapter_model.safetensors"), ("foreign.md", 0.1, "tuned")]


@pytest.mark.parametrize(("page", "least", "written"), SCRIPTS)
def test_the_script_of_a_page_trains(page, least, written, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 32, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 24}
    model = fk.Transformer(fk.TransformerSpec(**sizes, max_seq_len=32))
    fk.save_huggingface(model, "base")
    (script,) = blocks_of(page)
    try:
        exec(compile(script, page, "exec"), {"__name__": "__main__"})
    finally:
        fk.shutdown()
    first, *_, last = re.findall(r"(?<!\S)\d+\.\d+(?:e-\d+)?(?!\S)", capsys.readouterr().out)
    assert float(last) < float(first) - least
    assert (tmp_path / written).exists()
    if page == "foreign.md":
        fk.load_huggingface(model, "tuned")


def test_the_loop_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = torch.arange(6000) % 50
    fk.write_tokens("data/stdlib", [ids.numpy()], vocab_size=4096, eos_id=0)
    (loop,) = (block for block in blocks_of("../README.md") if "fk.step_metrics(" in block)
    names = {}
    exec(compile(loop, "README.md", "exec"), names)
    state, metrics = names["state"], names["metrics"]
    assert (state.step, state.samples) == (6, len(names["dataset"]))
    assert 0 < metrics["loss"] < math.log(4096)
    assert names["norms"].keys() == dict(state.model.named_parameters()).keys()


def test_the_table_of_layouts_is_complete_and_within_the_bounds():
    rows = re.findall(r"^\| `(\S+)` \|(.*)\|$", (DOCS / "layout_errors.md").read_text(), re.M)
    assert [name for name, _ in rows] == list(LAYOUTS)
    for name, cells in rows:
        world, count, gradient, sgd, adamw, double = (float(cell) for cell in cells.split("|"))
        assert (world, count) == (LAYOUTS[name].world, 4)
        errors = zip((gradient, sgd, adamw, double), (5e-7, 1e-6, 1e-6, 1e-10), strict=True)
        assert all(0 < error < bound for error, bound in errors), name


def test_the_table_of_lazy_and_eager_is_what_the_simulated_clock_says():
    text = (DOCS / "rollouts.md").read_text()
    rows = re.findall(r"^\| (eager|lazy) \| (\d) \|(.*)\|$", text, re.M)
    assert len(rows) == 3
    for kind, most, cells in rows:
        found = simulate(eager=kind == "eager", most=int(most))
        assert cells.strip() == f"{found.staleness:.2f} | {found.idle:.1%}"


@pytest.mark.parametrize("page", PAGES)
def test_names_on_a_page_exist_and_take_the_arguments_that_it_shows(page):
    """Of tests, files and the package."""
    root = DOCS.parent
    text = (root / page).read_text()
    sources = "".join(path.read_text() for path in (root / "tests").rglob("*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    assert [test for test in named if f"def {test}(" not in sources] == []
    paths = re.findall(r"`((?:tests|docs|recipes|benchmarks)/[\w/]+\.py)`", text)
    assert all((root / path).exists() for path in paths), paths
    for name in re.findall(r"\bfk(?:\.\w+)+", text):
        find(name)
    for block in blocks_of(f"../{page}"):
        check_calls(block)


def test_every_public_name_is_on_exactly_one_page_of_the_reference():
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = " ".join(re.findall(r"^\.\. entries::\n\n(.*?)^```$", text, re.M | re.S)).split()
    public = {*fk.__all__, *(f"config.{name}" for name in fk.config.__all__)}
    for room in (DOCS.parent / "forgekit").glob("*/__init__.py"):
        public |= {
            f"{room.parent.name}.{name}" for name in re.findall(r" as (\w+)", room.read_text())
        }
    # And of rooms that are one file.
    public |= {f"{room}.{name}" for name, room in fk._ROOMS.items()}
    public |= {"report.plot_losses"}
    assert sorted(listed) == sorted(public)


def test_the_picture_of_the_floors_is_the_contract():
    picture = floors.draw()
    drawn = re.findall(r'font-weight="bold"[^>]*>(\w+)</text>', picture)
    assert drawn == [name for floor in floors.floors() for name in floor]
    assert drawn.index("run") < drawn.index("steps") < drawn.index("data") < drawn.index("mesh")


def test_links_of_the_readme_lead_somewhere():
    text = (DOCS.parent / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert len(links) > 10
    for link in links:
        path, _, anchor = link.partition("#")
        shown = (DOCS.parent / path).read_text("utf-8", "replace")
        headings = re.findall(r"^#+ (.*)$", shown, re.M)
        slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}
        assert not anchor or anchor in slugs, link
