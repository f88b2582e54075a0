"""Which checkpoints stay: by hand, against the rules one by one, and on disk."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import build

import forgekit as fk
from forgekit.checkpoints import directory
from forgekit.files import locked

METRICS = {0: None, 1: 5.0, 2: 3.0, 3: math.nan, 4: 3.0, 5: 9.0, 6: None, 8: 4.0, 9: 7.0}
RULES = [
    (fk.Keep(last=1, every=3), {3, 6, 9}),
    (fk.Keep(last=1, milestones=True), {0, 1, 2, 4, 8, 9}),
    (fk.Keep(last=1, best=1), {4, 9}),  # of equal ones the newest
    (fk.Keep(last=1, best=2), {2, 4, 9}),
    (fk.Keep(last=2, every=5, milestones=True, best=1), {0, 1, 2, 4, 5, 8, 9}),
    (fk.Keep(last=50, best=50), set(METRICS)),
]


def test_a_rule_names_what_stays():
    for rule, kept in RULES:
        assert rule.of(METRICS) == kept, rule
    with pytest.raises(ValueError, match=r"every 0 must be at least 1\."):
        fk.Keep(every=0)
    with pytest.raises(ValueError, match=r"keep 0 must be at least 1\."):
        fk.checkpoint_save(build(), "nowhere", keep=0)


def saved(where, losses, **options):
    """Save step after step, each with a metric, of a state that knows nothing of the others."""
    for step, loss in losses.items():
        fk.checkpoint_save(build(step=step), where, blocking=True, metric=loss, **options)


def steps(where):
    return [int(path.name[5:]) for path in sorted(where.glob("step_*"))]


def test_the_best_outlives_newer_ones_and_what_is_being_loaded_all(tmp_path):
    saved(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: None}, keep=fk.Keep(last=2, best=1))
    assert steps(tmp_path) == [2, 4, 5]
    one, other = (locked(tmp_path / "step_00000002", shared=True) for _ in range(2))
    with one, other:
        saved(tmp_path, {6: None}, keep=1)
        assert steps(tmp_path) == [2, 6]
    saved(tmp_path, {7: None}, keep=1)
    assert steps(tmp_path) == [7]


def test_going_back_keeps_what_was_just_saved_and_says_what_is_newer(tmp_path, caplog):
    saved(tmp_path, {3: None, 4: None, 1: None}, keep=2)
    assert steps(tmp_path) == [1, 3, 4]
    assert os.readlink(tmp_path / "latest") == "step_00000001"
    assert "holds step 4, newer than step 1 that was just saved" in caplog.text


def test_only_what_dead_saves_left_is_deleted(tmp_path):
    dead, alive = (tmp_path / f".step_00000007.{digit * 12}.new" for digit in "ab")
    for folder in (dead, alive, other := tmp_path / ".step_00000001.mine.new"):
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    (tmp_path / f".step_00000001.{'c' * 12}.new").symlink_to(other.name)
    (tmp_path / ".latest.new").symlink_to("step_00000007")
    with locked(alive):
        saved(tmp_path, {3: None})
    assert not dead.exists()
    assert not (tmp_path / ".latest.new").is_symlink()
    assert all((folder / "notes.txt").exists() for folder in (alive, other))


def write_folders(root, manifests):
    """Make folders by step: with a manifest of a metric, with a broken one, or with none."""
    for step, metric in manifests.items():
        folder = root / f"step_{step:08d}"
        folder.mkdir(parents=True)
        if metric == "broken":
            (folder / "manifest.json").write_bytes(b"{}")
        elif metric != "missing":
            content = {"step": step, "metric": metric, "run": "a", "format": 3}
            content |= {"folder": "", "files": {}, "fields": {"step": step, "samples": 0}}
            (folder / "manifest.json").write_bytes(directory.format_manifest(content))


FOLDERS = st.none() | st.floats(0, 9) | st.sampled_from(["broken", "missing"])
EVERY = st.none() | st.integers(1, 9)
SOME = {"last": st.integers(1, 5), "milestones": st.booleans(), "best": st.integers(0, 2)}


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.integers(0, 40), FOLDERS, min_size=1),
    st.none() | st.builds(fk.Keep, every=EVERY, **SOME),
    st.data(),
)
def test_what_stays_does_not_depend_on_how_many_manifests_are_read(manifests, rule, data):
    """The rule of all committed ones decides, and what has no good manifest is never deleted."""
    good = {s: m for s, m in manifests.items() if m not in ("broken", "missing")}
    just_saved = data.draw(st.sampled_from(sorted(good) or [99]))
    with tempfile.TemporaryDirectory() as folder:
        write_folders(Path(folder), manifests)
        newest = fk.latest_checkpoint(folder)
        directory.retain(directory.storage_of(folder), rule, just_saved)
        left = set(steps(Path(folder)))
        assert newest == fk.latest_checkpoint(folder)
    kept = set(good) if rule is None else rule.of(good) | ({just_saved} & good.keys())
    assert left == kept | (manifests.keys() - good.keys())
    assert newest == (Path(folder) / f"step_{max(good):08d}" if good else None)


def test_manifests_of_many_that_stay_are_not_read(tmp_path, monkeypatch):
    read = mock.Mock(wraps=directory.read_manifest)
    monkeypatch.setattr(directory, "read_manifest", read)
    write_folders(tmp_path, dict.fromkeys(range(1, 100), 1.0))
    saved(tmp_path, {5000: 2.0}, keep=fk.Keep(last=2, every=1))
    assert read.call_count <= 4
    with pytest.raises(fk.CheckpointError, match=r"no committed step 7000; it has .*99, 5000\."):
        fk.checkpoint_load(build(), tmp_path, step=7000)
