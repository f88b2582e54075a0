"""The recipe of several sources: how they are given, and mistakes in them."""

from __future__ import annotations

import pytest
from runs import load_recipe, rows_of, run_here

ROWS = 4
SMALL = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 300}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments for a tiny run on three folders of texts, whose token files are made once."""
    folder = tmp_path_factory.mktemp("curriculum")
    names = ("asyncio", "mail", "tables")
    for name in names:
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(
            "".join(f"{name} {at} of a line\n" for at in range(99))
        )
    return [
        *(f"data.sources.{name}={folder / name}" for name in names),
        *(f"model.{name}={size}" for name, size in SMALL.items()),
        *(f"data.path={folder / 'data'}", "data.seq_len=32", "phases=[]", "steps=54", "warmup=4"),
        *("decay=9", f"global_batch_size={ROWS}", "batch_size=2"),
    ]


def test_sources_that_are_given_take_the_place_of_the_default_ones(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name} of a line\n" * 90)
    recipe = load_recipe("curriculum")
    sources = f"data.sources={{a='{tmp_path}/a', b='{tmp_path}/b'}}"
    given = [sources, f"data.path={tmp_path}/data", "data.seq_len=32", "phases=[]"]
    config = recipe.load_config(recipe.Config, given)
    recipe.write_token_files(config.data, 300)
    with pytest.raises(ValueError, match=r'^weights lack "a", "b"; give each'):
        recipe.build_dataset(config.data, [], 0)
    config = recipe.load_config(recipe.Config, [*given, "data.weights={a=1,b=3}"])
    order = recipe.build_dataset(config.data, [], 0).order
    assert order.sources == ("a", "b")
    assert order.shares(0, 2**20).tolist() == pytest.approx([0.25, 0.75], abs=0.01)


BAD = {
    "unknown source": (
        "phases=[{step=3, weights={mails=1}}]",
        f'error: the phase at sample {3 * ROWS}: weights name "mails"; the sources are '
        '"asyncio", "mail", "tables".',
    ),
    "no step": ("phases=[{weights={mail=1}}]", "phases[0].step: required, but not given"),
    "no room": ("decay=51", "error: warmup 4 + decay 51 = 55 must fit into total 54"),
}


@pytest.mark.parametrize(("argument", "message"), BAD.values(), ids=BAD)
def test_a_mistake_exits_with_2_and_is_named(argument, message, given, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        run_here("curriculum", [*given, f"out={tmp_path / 'o'}", argument])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert rows_of(tmp_path / "o") == []
