"""What cannot run is refused in set-up, and a plan says the sentence that the ranks say."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
from pool import run_ranks
from runs import arguments, rows_of, run_here, saved_step, signal_handlers_kept

import forgekit as fk
from forgekit.cli.program import main

WORLD = 2
IMPOSSIBLE = {
    "a mesh that does not fit": ("mesh__dp_shard=3", "dp_shard 3 = 3 does not fit 2 ranks; "),
    "key and value heads over tp": ("mesh__tp=2 model__kv_heads=1", "is 1, not a multiple of tp 2"),
    "positions over cp": ("mesh__cp=2 data__seq_len=14", "must be a multiple of 4 (cp 2"),
    "rows longer than the model takes": ("data__seq_len=17", "above max_seq_len 16 of the model; "),
    "a global batch that does not divide": ("global_batch_size=10", "the nearest are 8 and 16"),
    "fewer micro-batches than stages": (
        "mesh__pp=2 global_batch_size=4 model__tied=false",
        "micro-batch",
    ),
    "a vocabulary below the data's": ("model__vocab_size=63", "63 of the model is below the 64 of"),
}
IN_A_STEP = "positions over cp", "fewer micro-batches than stages"
"""Refused where the first step is taken, and no mistake of usage to ``main``."""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """For each name the arguments of a run."""
    path = tmp_path_factory.mktemp("data") / "tokens"
    fk.write_tokens(path, [list(range(64)) * 16], vocab_size=64, eos_id=0)
    return {
        name: arguments(
            out=path.parent / str(number),
            **{"data__path": path, **dict(word.split("=") for word in settings.split())},
            steps=1,
        )
        for number, (name, (settings, _)) in enumerate(IMPOSSIBLE.items())
    }


def _run_all(rank, world, folder, given):
    """What a rank of each run says, on the screen and by its exception."""
    said = {}
    for number, (name, command_line) in enumerate(given.items()):
        store = dist.FileStore(str(folder / f"store_{number}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        with redirect_stderr(StringIO()) as shown, pytest.raises((SystemExit, Exception)) as stop:
            run_here("pretrain", command_line)
        fk.shutdown()
        said[name] = f"{shown.getvalue()}{stop.value}", stop.type is SystemExit and stop.value.code
    return said


@pytest.fixture(scope="module")
def of_ranks(given, tmp_path_factory):
    return run_ranks(_run_all, WORLD, tmp_path_factory.mktemp("stores"), given, group=False)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_the_first_error_of_a_plan_is_that_of_the_run(name, given, of_ranks, capsys):
    _, sentence = IMPOSSIBLE[name]
    assert [said[name][1] for said in of_ranks] == [name not in IN_A_STEP and 2] * WORLD
    with signal_handlers_kept():
        assert main(["plan", "pretrain", *given[name], f"--world={WORLD}"]) in (1, 2)
    for text in (capsys.readouterr().err, of_ranks[0][name][0]):
        assert sentence in text
    (out,) = (Path(word[4:]) for word in given[name] if word.startswith("out="))
    assert (rows_of(out), saved_step(out)) == ([], 0)
