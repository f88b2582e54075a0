"""Which checkpoints stay: by hand, against the rules one by one, and on disk."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import rewrite

import forgekit as fk
from forgekit.checkpoints import directory, load
from forgekit.files import locked
from forgekit.ranks import CheckpointError

METRICS = {0: None, 1: 5.0, 2: 3.0, 3: math.nan, 4: 3.0, 5: 9.0, 6: None, 8: 4.0, 9: 7.0}
RULES = {
    "newest": (fk.Keep(last=2), {8, 9}),
    "every": (fk.Keep(last=1, every=3), {3, 6, 9}),
    "milestones": (fk.Keep(last=1, milestones=True), {0, 1, 2, 4, 8, 9}),
    "best": (fk.Keep(last=1, best=2), {2, 4, 9}),
    "best, of equal ones the newest": (fk.Keep(last=1, best=1), {4, 9}),
    "largest": (fk.Keep(last=1, best=2, largest=True), {5, 9}),
    "all of them": (fk.Keep(last=1, every=5, milestones=True, best=1), {0, 1, 2, 4, 5, 8, 9}),
    "more than there are": (fk.Keep(last=50, best=50), set(METRICS)),
}


@pytest.mark.parametrize(("rule", "kept"), RULES.values(), ids=RULES)
def test_a_rule_names_what_stays(rule, kept):
    assert rule.of(METRICS) == kept


@given(
    st.dictionaries(st.integers(0, 200), st.none() | st.floats(), min_size=1),
    st.builds(
        fk.Keep,
        last=st.integers(1, 5),
        every=st.none() | st.integers(1, 20),
        milestones=st.booleans(),
        best=st.integers(0, 3),
        largest=st.booleans(),
    ),
)
def test_the_newest_always_stays_and_more_rules_keep_more(metrics, rule):
    kept = rule.of(metrics)
    assert max(metrics) in kept <= metrics.keys()
    assert kept >= fk.Keep(last=rule.last).of(metrics)
    assert len(kept) <= len(metrics)


BAD = {
    "last": ({"last": 0}, r"keep 0 must be at least 1\."),
    "every": ({"every": 0}, r"every 0 must be at least 1\."),
    "best": ({"best": -1}, "best -1 must be at least 0"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_rules_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fk.Keep(**options)


@pytest.mark.parametrize("keep", [1.5, "3"])
def test_what_is_no_rule_is_refused_before_anything_is_written(tmp_path, keep):
    with pytest.raises(TypeError, match=r"keep is .*; pass an integer"):
        fk.checkpoint_save(build(), tmp_path / "checkpoints", keep=keep)
    assert not (tmp_path / "checkpoints").exists()


# On disk


def build():
    model = torch.nn.Linear(2, 2)
    return fk.TrainState.create(model, torch.optim.SGD(model.parameters()))


def saved(where, losses, **options):
    """Save step after step, each with a metric."""
    state = build()
    for step, loss in losses.items():
        state = fk.donate(state, step=step)
        fk.checkpoint_save(state, where, blocking=True, metric=loss, **options)


def steps(where):
    return [int(path.name[5:]) for path in sorted(where.glob("step_*"))]


def test_the_best_outlives_newer_ones_and_survives_a_restart(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: None}
    for step, loss in losses.items():  # each save by a process that knows nothing of the others
        saved(tmp_path, {step: loss}, keep=fk.Keep(last=2, best=1))
    assert steps(tmp_path) == [2, 4, 5]
    assert os.readlink(tmp_path / "latest") == "step_00000005"


def test_what_is_being_loaded_is_not_deleted_until_it_is_loaded(tmp_path):
    saved(tmp_path, {1: None, 2: None}, keep=None)
    with (
        locked(tmp_path / "step_00000001", shared=True),
        locked(tmp_path / "step_00000001", shared=True),
    ):
        saved(tmp_path, {3: None}, keep=1)
        assert steps(tmp_path) == [1, 3]
    saved(tmp_path, {4: None}, keep=1)
    assert steps(tmp_path) == [4]


def test_checkpoints_without_metrics_are_not_the_best(tmp_path):
    saved(tmp_path, {1: 2.0, 2: 3.0}, keep=None)
    rewrite(tmp_path / "step_00000001", lambda manifest: manifest.pop("metric"))
    assert fk.checkpoint_load(build(), tmp_path, step=1).step == 1
    saved(tmp_path, {3: 9.0}, keep=fk.Keep(last=1, best=1))
    assert steps(tmp_path) == [2, 3]


# Many folders


@pytest.fixture
def reads(monkeypatch):
    """The steps whose manifest is read, in order."""
    steps, read = [], directory.read_manifest
    monkeypatch.setattr(
        directory, "read_manifest", lambda storage, step: steps.append(step) or read(storage, step)
    )
    return steps


def write_folders(root, manifests):
    """Make folders by step: with a manifest of a metric, with a broken one, or with none."""
    for step, metric in manifests.items():
        folder = root / f"step_{step:08d}"
        folder.mkdir(parents=True)
        if metric == "broken":
            (folder / "manifest.json").write_bytes(b"{}")
        elif metric != "missing":
            fields = {"step": step, "samples": 0}
            content = {"step": step, "metric": metric, "fields": fields, "run": "a", "format": 3}
            content |= {"folder": "", "files": {}}
            (folder / "manifest.json").write_bytes(directory.format_manifest(content))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 40),
        st.none() | st.floats(0, 9) | st.sampled_from(["broken", "missing"]),
        min_size=1,
    ),
    st.none()
    | st.builds(
        fk.Keep,
        last=st.integers(1, 5),
        every=st.none() | st.integers(1, 9),
        milestones=st.booleans(),
        best=st.integers(0, 2),
        largest=st.booleans(),
    ),
    st.data(),
)
def test_what_stays_does_not_depend_on_how_many_manifests_are_read(manifests, rule, data):
    """The rule of all committed ones decides, and what has no good manifest is never deleted."""
    good = {s: m for s, m in manifests.items() if m not in ("broken", "missing")}
    saved = data.draw(st.sampled_from(sorted(good) or [99]))
    with tempfile.TemporaryDirectory() as folder:
        write_folders(Path(folder), manifests)
        directory.retain(directory.storage_of(folder), rule, saved)
        left = set(steps(Path(folder)))
    kept = set(good) if rule is None else rule.of(good) | ({saved} & good.keys())
    assert left == kept | (manifests.keys() - good.keys())


@pytest.mark.parametrize("older", [100, 2000])
@pytest.mark.parametrize("kind", [1.0, "broken", "missing"])
def test_many_folders_cost_no_scan_and_no_warning_each(tmp_path, reads, caplog, kind, older):
    write_folders(tmp_path, dict.fromkeys(range(older), kind))
    saved(tmp_path, {5000: 2.0, 5001: 2.0}, keep=fk.Keep(last=2, every=1))
    assert len(caplog.messages) == 2 * (kind == "broken")  # one for each save
    caplog.clear()
    # What the rules ask for and a hundred that failed, in two saves; the first save looks for the
    # run's number, which none of the folders may have.
    search = older if isinstance(kind, str) else 0
    assert len(reads) <= search + (8 if kind == 1.0 else 208)
    reads.clear()
    assert fk.latest_checkpoint(tmp_path).name == "step_00005001"
    assert reads == [5001]
    reads.clear()
    assert fk.checkpoint_load(build(), tmp_path).step == 5001
    assert len(reads) == 1 + load.NEAR
    assert len(caplog.messages) <= 1
    with pytest.raises(CheckpointError, match=r"no committed step 7000; it has .*5000, 5001\."):
        fk.checkpoint_load(build(), tmp_path, step=7000)
