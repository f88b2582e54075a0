import json
import sys

import pytest

from forgekit.run.report import plot_losses


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def rows_of(count, scale=1.0):
    rows = [
        {"step": step, "train/loss": scale * (2 + 5 / step), "train/lr": 1e-3 / step}
        for step in range(1, count + 1)
    ]
    rows[count // 2]["train/loss"] = None
    rows[-1]["eval/held_out/loss"] = scale * 2.1
    return rows


def test_the_picture_is_a_png_that_shows_the_data(tmp_path):
    from matplotlib.image import imread

    first = plot_losses(write(tmp_path / "a.jsonl", rows_of(80)), tmp_path / "new" / "a.png")
    same = plot_losses(write(tmp_path / "b.jsonl", rows_of(80)), tmp_path / "new" / "b.png")
    other = plot_losses(write(tmp_path / "c.jsonl", rows_of(80, 1.5)), tmp_path / "new" / "c.png")
    content = first.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert 10_000 < len(content) < 500_000
    assert imread(first).shape == (825, 1200, 4)
    assert same.read_bytes() == content
    assert other.read_bytes() != content
    assert sorted(path.name for path in first.parent.iterdir()) == ["a.png", "b.png", "c.png"]


@pytest.mark.parametrize(
    "change",
    [{"train/loss": 6.0}, {"train/lr": 0.01}, {"eval/held_out/loss": 4.0}, {"eval/b/loss": 3.0}],
    ids=lambda change: next(iter(change)),
)
def test_each_curve_is_in_the_picture(tmp_path, change):
    rows = rows_of(40)
    before = plot_losses(write(tmp_path / "m.jsonl", rows), tmp_path / "m.png").read_bytes()
    rows[-1] |= change
    after = plot_losses(write(tmp_path / "m.jsonl", rows), tmp_path / "m.png").read_bytes()
    assert after != before


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 1, "train/loss": 3.0, "train/lr": 0.1}],
        [{"step": 1, "eval/held_out/loss": 3.0}],
        [{"step": 1, "train/loss": None, "train/lr": 0.1}, {"step": 2, "train/loss": 3.0}],
    ],
    ids=["one row", "evaluation alone", "first loss not finite"],
)
def test_short_runs_have_a_picture_too(tmp_path, rows):
    path = plot_losses(write(tmp_path / "m.jsonl", rows), tmp_path / "m.png")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bad_input
@pytest.mark.parametrize("rows", [[], [{"step": 1, "train/loss": None, "train/lr": 0.1}]])
def test_nothing_to_draw_is_an_error_and_no_picture(tmp_path, rows):
    path = write(tmp_path / "m.jsonl", rows)
    with pytest.raises(ValueError, match=rf"{len(rows)} rows and no finite loss .* Train for"):
        plot_losses(path, tmp_path / "m.png")
    assert not (tmp_path / "m.png").exists()


def test_pyplot_is_not_used(tmp_path, monkeypatch):
    """Its global figures and its choice of a window system belong to the user's own script."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    path = plot_losses(write(tmp_path / "m.jsonl", rows_of(5)), tmp_path / "m.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "forgekit\[plot\]"'):
        plot_losses(write(tmp_path / "m.jsonl", rows_of(5)), tmp_path / "m.png")
