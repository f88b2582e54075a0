"""The first error of a configuration that cannot run: a plan's is that of real ranks."""

from __future__ import annotations

import re

import pytest
from covering import some_of
from runs import arguments, launch

import forgekit as fk
from forgekit.cli.program import main

IMPOSSIBLE = {
    "a mesh that does not fit": {"mesh__tp": 4},
    "key and value heads over tp": {"mesh__tp": 2, "model__kv_heads": 1},
    "positions over cp": {"mesh__cp": 2, "data__seq_len": 14},
    "more positions than the model has": {"data__seq_len": 32},
    "a global batch": {"global_batch_size": 7},
    "tied weights in stages": {"mesh__pp": 2},
    "fewer micro-batches than stages": {
        "mesh__pp": 2,
        "global_batch_size": 4,
        "model__tied": "false",
    },
    "a vocabulary below the data's": {"model__vocab_size": 32},
}
OF_STAGES = "tied weights in stages", "fewer micro-batches than stages"
WORLD = 2
ERROR = re.compile(r"^(?:error|(?:\[rank\d\]: )?\w*Error|  (?:mesh|model)): (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tokens"
    fk.write_tokens(path, [list(range(64)) * 16], vocab_size=64, eos_id=0)
    return path


@pytest.mark.parametrize("name", some_of(IMPOSSIBLE, *OF_STAGES, "positions over cp"))
def test_the_first_error_of_a_plan_is_that_of_the_run(capsys, tokens, tmp_path, name):
    given = arguments(out=tmp_path / "run", data__path=tokens, steps=1, **IMPOSSIBLE[name])
    with launch("pretrain", given, log=tmp_path / "log", ranks=WORLD) as job:
        assert job.end() != 0
    errors = ERROR.findall(job.output)
    assert len(set(errors)) == 1, job.output
    assert main(["plan", "pretrain", *given, f"--world={WORLD}"]) in (1, 2)
    assert f": {errors[0]}\n" in capsys.readouterr().err
