"""Manifests that were changed, are something else, or belong to another directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from manifests import edit, rewrite
from ranks import run_ranks
from torch import nn

import forgekit as fk

pytestmark = pytest.mark.bad_input


def build(step=0):
    torch.manual_seed(step)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = fk.TrainState.create(model, optimizer)
    if step:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return fk.donate(state, step=step, samples=4 * step)


def setting(*path):
    """Change a value deep in a manifest as with an editor."""
    *keys, last, value = path

    def change(manifest):
        for key in keys:
            manifest = manifest[key]
        assert manifest[last] != value
        manifest[last] = value

    return lambda folder: edit(folder, change)


def without(key, *, old):
    drop = rewrite if old else edit
    return lambda folder: drop(folder, lambda manifest: manifest.pop(key))


def signed(*path):
    """Change a value and the checksum with it."""

    def change(folder):
        *keys, last, value = path

        def apply(manifest):
            for key in keys:
                manifest = manifest[key]
            manifest[last] = value

        rewrite(folder, apply)

    return change


def content(data):
    return lambda folder: (folder / "manifest.json").write_bytes(data)


def fifo(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def link(target):
    def change(folder):
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").symlink_to(target)

    return change


def copied_link(folder):
    """Right in itself, but nobody says where it leads tomorrow."""
    (folder / "manifest.json").rename(folder.parent / "elsewhere.json")
    (folder / "manifest.json").symlink_to("../elsewhere.json")


def folder_instead(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def listed(name, entry):
    return lambda folder: rewrite(folder, lambda manifest: manifest["files"].update({name: entry}))


def device(folder):
    """A listed shard that is a device; its size is what the manifest says."""
    (folder / "zero").symlink_to("/dev/zero")
    listed("zero", NOTHING)(folder)


def pipe(folder):
    os.mkfifo(folder / "pipe")
    listed("pipe", NOTHING)(folder)


NOTHING = {"bytes": 0, "crc32": "00000000"}
CHANGED = r"was changed after it was saved: its checksum is \w{12} instead of '\w{12}"
WEIGHT, SHARD = "model.weight", "rank_00000.safetensors"
CASES = {
    "more samples": (setting("fields", "samples", 1000), CHANGED),
    "another step inside": (setting("fields", "step", 7), CHANGED),
    "another step": (setting("step", 7), CHANGED),
    "another seed": (setting("fields", "seed", 7), CHANGED),
    "another fingerprint": (setting("fingerprint", "b"), CHANGED),
    "another optimizer": (setting("optimizer_class", "SGD"), CHANGED),
    "another shape": (setting("tensors", WEIGHT, "shape", [3, 5]), CHANGED),
    "another file size": (setting("files", SHARD, "bytes", 3), CHANGED),
    "another checksum": (setting("checksum", "0123456789abcdef"), CHANGED),
    "no checksum but a number": (setting("checksum", 5), "was changed after it was saved"),
    "no fields": (without("fields", old=False), CHANGED),
    "signed, no fields": (without("fields", old=True), "has no 'fields', or one of the"),
    "signed, no tensors": (
        without("tensors", old=True),
        "has no 'tensors', or one",
    ),
    "signed, no files": (without("files", old=True), "has no 'files', or one of the wrong type"),
    "signed, no optimizer": (
        without("optimizer", old=True),
        "has no 'optimizer', or one of the",
    ),
    "signed, no step": (without("step", old=True), "has no 'step', or one of the wrong type"),
    "signed, no format": (without("format", old=True), "describes no checkpoint"),
    "signed, a list of files": (signed("files", []), "has no 'files', or one of the wrong type"),
    "signed, a text for the step": (signed("step", "2"), "has no 'step', or one of the wrong type"),
    "signed, a text for fields": (
        signed("fields", "samples"),
        "has no 'fields', or one of the",
    ),
    "signed, a metric in words": (
        signed("metric", "low"),
        "has the metric 'low', which",
    ),
    "signed, no size": (signed("files", SHARD, {}), "has no size and checksum of 'rank_00000"),
    "signed, size in words": (
        signed("files", SHARD, {"bytes": "3", "crc32": ""}),
        "has no size and checksum of 'rank_00000",
    ),
    "signed, samples in words": (signed("fields", "samples", "many"), "that is no count"),
    "a file outside": (
        listed("../../dev/zero", NOTHING),
        "a file outside the checkpoint: '../../d",
    ),
    "a file anywhere": (listed("/dev/zero", NOTHING), "a file outside the checkpoint"),
    "a device": (device, "zero cannot be read: Not a regular file"),
    "a pipe": (pipe, "pipe cannot be read: Not a regular file"),
    "a missing shard": (listed("lost", NOTHING), r"lost is missing \(0 bytes expected\)"),
    "nothing": (content(b""), "is not JSON"),
    "half of it": (content(b'{"format": 2, "files": {'), "is not JSON"),
    "brackets": (content(b"[" * 100_000), "is not JSON"),
    "braces": (content(b'{"format":' * 100_000), "is not JSON"),
    "closed brackets": (content(b"[" * 100_000 + b"]" * 100_000), "is not JSON"),
    "no text": (content(b"\xff\x00"), "is not JSON"),
    "5,000 digits": (content(b'{"format": 2, "step": ' + b"9" * 5000 + b"}"), "is not JSON"),
    "a list": (content(b"[]"), "describes no checkpoint"),
    "a number": (content(b"1"), "describes no checkpoint"),
    "a format of lists": (content(b'{"format": [1]}'), "describes no checkpoint"),
    "format alone": (content(b'{"format": 2}'), "was changed after it was saved"),
    "a pipe for it": (fifo, "cannot be read: Not a regular file"),
    "a device for it": (
        link("../../../../../../../../dev/zero"),
        "cannot be read: Too many",
    ),
    "a link that leads nowhere": (link("../../dev/zero"), "cannot be read: Too many levels of"),
    "a link to a copy": (copied_link, "cannot be read: Too many levels of symbolic links"),
    "a directory for it": (folder_instead, "cannot be read: (Is a directory|Not a regular file)"),
}


@pytest.mark.parametrize(("damage", "message"), CASES.values(), ids=CASES)
def test_a_newest_manifest_that_is_none_is_passed_over(tmp_path, caplog, damage, message):
    for step in (1, 2):
        fk.checkpoint_save(build(step), tmp_path, blocking=True)
    expected = build(1).model.weight
    damage(tmp_path / "step_00000002")
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(build(), tmp_path, step=2)
    state = fk.checkpoint_load(build(), tmp_path)
    assert (state.step, state.samples) == (1, 4)
    torch.testing.assert_close(state.model.weight, expected, rtol=0, atol=0)
    assert "step_00000002" in caplog.text
    fk.checkpoint_save(build(3), tmp_path, keep=1, blocking=True)
    assert fk.checkpoint_load(state, tmp_path).step == 3


@pytest.mark.parametrize(
    "case", ["more samples", "brackets", "a pipe for it", "a device", "nothing"]
)
def test_a_run_does_not_start_over_beside_a_manifest_that_is_none(tmp_path, case):
    damage, message = CASES[case]
    fk.checkpoint_save(build(2), tmp_path, blocking=True)
    damage(tmp_path / "step_00000002")
    with pytest.raises(fk.CheckpointError, match=rf"no whole checkpoint to load: .*{message}"):
        fk.checkpoint_load(build(), tmp_path)


@pytest.mark.parametrize("name", ["step_00000500", "step_00000001"])
def test_a_renamed_directory_is_no_checkpoint(tmp_path, caplog, name):
    fk.checkpoint_save(build(2), tmp_path, blocking=True)
    fk.checkpoint_save(build(3), tmp_path / "other", blocking=True)
    here = tmp_path / "other" / name
    (tmp_path / "step_00000002").rename(here)
    step = int(name[-3:])
    message = (
        rf"{name}/manifest.json says step 2, so the directory was renamed; step_00000002 is its"
    )
    with pytest.raises(fk.CheckpointError, match=rf"it has 3\. {message}"):
        fk.checkpoint_load(build(), tmp_path / "other", step=step)
    assert fk.checkpoint_load(build(), tmp_path / "other").step == 3
    assert "says step 2, so the directory was renamed" in caplog.text
    assert fk.latest_checkpoint(tmp_path / "other").name == "step_00000003"
    here.rename(tmp_path / "other" / "step_00000002")
    assert fk.checkpoint_load(build(), tmp_path / "other", step=2).step == 2


def test_a_manifest_may_be_formatted_anew(tmp_path):
    fk.checkpoint_save(build(2), tmp_path, blocking=True)
    file = tmp_path / "step_00000002" / "manifest.json"
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items()))))
    assert fk.checkpoint_load(build(), tmp_path).step == 2


def _pass_over(rank, world, directory):
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(nn.Linear(4, 3), mesh)
    state = fk.TrainState.create(model, torch.optim.AdamW(model.parameters()), mesh=mesh)
    return fk.checkpoint_load(state, directory).step


@pytest.mark.parametrize("case", ["more samples", "a device", "a pipe for it", "signed, no step"])
def test_ranks_agree_on_a_manifest_that_is_none(tmp_path, case):
    for step in (1, 2):
        fk.checkpoint_save(build(step), tmp_path, blocking=True)
    CASES[case][0](tmp_path / "step_00000002")
    assert run_ranks(_pass_over, 2, tmp_path) == [1, 1]


URLS = ["more samples", "another step", "brackets", "signed, no fields", "a file outside", "a list"]


@pytest.mark.parametrize("case", URLS)
def test_manifests_behind_a_url_are_read_with_the_same_distrust(tmp_path, case):
    url = f"file://{tmp_path}"
    for step in (1, 2):
        fk.checkpoint_save(build(step), url, blocking=True)
    damage, message = CASES[case]
    damage(tmp_path / "step_00000002")
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(build(), url, step=2)
    assert fk.checkpoint_load(build(), url).step == 1
    Path(tmp_path / "step_00000001").rename(tmp_path / "step_00000004")
    with pytest.raises(fk.CheckpointError, match="says step 1, so the directory was renamed"):
        fk.checkpoint_load(build(), url, step=4)
