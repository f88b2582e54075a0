"""The first error of a configuration that cannot run: a plan's is that of real ranks."""

from __future__ import annotations

import re

import pytest
from runs import arguments, launch

import forgekit as fk
from forgekit.cli.program import main

IMPOSSIBLE = {
    "a mesh that does not fit": ("pretrain", {"mesh__tp": 4}),
    "a mesh with two sizes left open": ("pretrain", {"mesh__tp": -1}),
    "key and value heads over tp": ("pretrain", {"mesh__tp": 2, "model__kv_heads": 1}),
    "heads over ulysses": (
        "pretrain",
        {
            "mesh__cp": 2,
            "context_parallel": "ulysses",
            "model__dim": 48,
            "model__heads": 3,
            "model__kv_heads": 1,
        },
    ),
    "positions over cp": ("pretrain", {"mesh__cp": 2, "data__seq_len": 14}),
    "more positions than the model has": ("pretrain", {"data__seq_len": 32}),
    "a global batch": ("pretrain", {"global_batch_size": 7}),
    "fewer layers than stages": (
        "pretrain",
        {"mesh__pp": 2, "model__layers": 1, "model__tied": "false"},
    ),
    "tied weights in stages": ("pretrain", {"mesh__pp": 2}),
    "fewer micro-batches than stages": (
        "pretrain",
        {"mesh__pp": 2, "global_batch_size": 4, "model__tied": "false"},
    ),
    "experts over more ranks than there are data's": ("moe", {"mesh__ep": 2, "mesh__tp": 2}),
    "a vocabulary below the data's": ("pretrain", {"model__vocab_size": 32}),
    "no base": ("finetune", {}),
}
FINETUNE = ("base=gone", "data.path=gone.jsonl", "batch_size=4", "global_batch_size=8")
WORLD = 2
ERROR = re.compile(r"^(?:error|(?:\[rank\d\]: )?\w*Error|  (?:mesh|model)): (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tokens"
    fk.write_tokens(path, [list(range(64)) * 16], vocab_size=64, eos_id=0)
    return path


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_the_first_error_of_a_plan_is_that_of_the_run(capsys, tokens, tmp_path, name):
    recipe, settings = IMPOSSIBLE[name]
    given = [*FINETUNE, f"out={tmp_path / 'run'}"]
    if recipe != "finetune":
        given = arguments(out=tmp_path / "run", data__path=tokens, steps=1, **settings)
        given = [word for word in given if recipe == "pretrain" or not word.startswith("device=")]
    with launch(recipe, given, log=tmp_path / "log", ranks=WORLD) as job:
        assert job.end() != 0
    errors = ERROR.findall(job.output)
    assert len(set(errors)) == 1, job.output
    try:
        code = main(["plan", recipe, *given, f"--world={WORLD}"])
    except SystemExit as stop:
        code = stop.code
    assert code in (1, 2)
    planned = capsys.readouterr().err
    assert f": {errors[0]}\n" in planned
