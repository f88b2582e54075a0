"""Whatever becomes of the disk, a run ends with a reason and goes on from a whole checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest
from chaos.scene import MOST_LOST, Scene, describe
from chaos.survival import Outcome
from runs import last_step, saved_step, status_of
from saved import flip, truncate


@pytest.fixture(scope="module")
def stopped_once(tokens, tmp_path_factory):
    """A run that was stopped after step 21, with checkpoints of the steps 15, 20 and 21."""
    scene = Scene(tmp_path_factory.mktemp("stopped") / "run", tokens)
    life = scene.live(faults={1: {"signal_after": (18, ["SIGTERM"])}})
    assert life.end() == [0, 0], life.output
    assert saved_step(scene.out) == last_step(scene.out) == 21
    return scene.out


@pytest.fixture
def stopped(scene, stopped_once):
    """A copy of it, as the run directory."""
    shutil.copytree(stopped_once, scene.out, symlinks=True)
    return scene.out


FULL, NO_ROOM = {"limit_files": (7, 50_000)}, {"limit_files": (7, 0)}
CLOSED, OBEYS = {"read_only_after": (7, "checkpoints")}, {"obey_modes": None}
SAYS = "step 10 could not be saved|"
LARGE = f"{SAYS}File too large|Earlier checkpoints are untouched"
FAILING = {
    # What ranks 0 and 1 meet, what ``status.json`` says, and texts of the ranks.
    # Rows of metrics still fit; training goes on until the next save tells of the failure.
    "the disk is full when a checkpoint is written": (FULL, FULL, "failed", LARGE),
    # Nor does ``status.json`` fit then, so that it still says what it said before.
    "the disk is full when a row of metrics is written": (NO_ROOM, {}, "running", ""),
    "the checkpoints become read-only": (CLOSED, OBEYS, "failed", f"{SAYS}Permission denied"),
}


@pytest.mark.chaos
@pytest.mark.parametrize("name", FAILING)
def test_a_disk_that_takes_no_more_ends_the_run(scene, survived, name):
    *faults, status, texts = FAILING[name]
    life = scene.live(faults=dict(enumerate(faults)))
    life.end()
    (scene.out / "checkpoints").chmod(0o755)
    outcome = scene.survive(life, lost=MOST_LOST)
    assert (outcome.ended, outcome.status) == ("exit 1", status)
    assert [text for text in texts.split("|") if text not in life.output] == []
    survived(name, outcome)


@pytest.mark.chaos
def test_the_run_directory_is_read_only_from_the_start(scene, stopped, survived):
    kept, folders = _files(stopped), (stopped, stopped / "checkpoints")
    for folder in folders:
        folder.chmod(0o555)
    life = scene.live(faults={rank: {"obey_modes": None} for rank in range(2)})
    codes = life.end()
    assert 0 not in codes
    for folder in folders:
        folder.chmod(0o755)
    assert _files(stopped) == kept
    assert "Permission denied" in life.output
    outcome = Outcome(ended=describe(codes), status=status_of(stopped)["status"], lost=0)
    assert scene.go_on() == 21
    survived("the run directory is read-only from the start", outcome)


def _point_nowhere(link: Path) -> None:
    link.unlink()
    link.symlink_to("step_99999999")


DAMAGES = {
    # What was done to which file, and the steps it costs: the checkpoint before is of step 20.
    "the newest checkpoint is truncated": (truncate, "rank_00000.safetensors", 1),
    "a bit of the newest checkpoint flips": (flip, "rank_00001.safetensors", 1),
    "the newest checkpoint lacks a shard": (Path.unlink, "rank_00001.safetensors", 1),
    "the newest checkpoint lacks its manifest": (Path.unlink, "manifest.json", 1),
    "`latest` points nowhere": (_point_nowhere, "../latest", 0),
}


@pytest.mark.chaos
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(scene, stopped, survived, name):
    damage, file, lost = DAMAGES[name]
    outcome = Outcome(ended="exit 0", status=status_of(stopped)["status"], lost=0)
    damage(stopped / "checkpoints" / "step_00000021" / file)
    assert scene.go_on() == 21 - lost
    survived(name, attrs.evolve(outcome, lost=lost))


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
