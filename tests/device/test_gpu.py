"""``benchmarks/gpu.py``: every part on the pretend device, and runs that are cut off."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import gpu
import pytest
import torch
from covering import first_of
from device.pretend import NAME
from pool import run_ranks
from runs import draw_nothing, launch

import forgekit as fk
from forgekit import report

SCRIPT = Path(gpu.__file__)
PATIENT = """
import sys, gpu

gpu.LIMITS = dict.fromkeys(gpu.LIMITS, 900.0)  # a busy machine is no failure
sys.exit(gpu.main())
"""
HANGING = """
import sys, time
import gpu, gpu_parts

def hang(device):
    yield {"what": "a row", "verdict": "ok"}
    time.sleep(1000)

gpu_parts.late = gpu_parts.killed = gpu_parts.cut = hang
gpu.LIMITS |= {"late": 1.0, "killed": 500.0, "cut": 500.0}
sys.exit(gpu.main())
"""


def rows_of(out, what=None):
    """Rows that are there, whole lines all of them; only those of ``what``, by their parts."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return rows if what is None else {r["part"]: r for r in rows if r.get("what") == what}


QUICK = ("exact", "eager", "kernels", "losses", "memory")
"""Parts that take a second together."""


def run_parts(_rank, _world, device, parts):
    import gpu_parts

    module = torch.get_device_module(device)
    module.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing operation"):
        torch.ones(1, device=device).item()
    module.set_sync_debug_mode("default")
    with pytest.MonkeyPatch.context() as patch:  # no pictures, as in ``run_here``
        patch.setattr(fk, "wrap_up", draw_nothing)
        patch.setattr(report, "find_spec", draw_nothing)
        return [row for part in parts for row in gpu_parts.rows_of(part, device)]


@pytest.mark.parametrize("parts", [QUICK, pytest.param((*gpu.PARTS,), marks=pytest.mark.oracle)])
def test_every_part_runs_and_gives_verdicts(parts):
    """What is CUDA's alone is not on this device, and the rows say so."""
    options = {"setup": "device.pretend:install", "group": False, "timeout_s": 300}
    (rows,) = run_ranks(run_parts, 1, NAME, parts, **options)
    assert {row["part"] for row in rows} == {*parts}
    assert [row for row in rows if row["verdict"] not in gpu.GOOD] == []
    absent = {row["part"] for row in rows if row["verdict"] == "not on this device"}
    assert absent == {"compiled", "graphs", "kernels", "memory"} & {*parts}
    good = {(row["what"], row["entry"]) for row in rows if row["verdict"] == "ok"}
    assert good > {("no wait of the host", loss) for loss in ("loss_fn", "head_loss")}
    steps = ("logits", "head", "packed", "autocast")
    assert good > {("two steps as on the CPU", name) for name in steps}
    if parts != QUICK:
        assert ("recipe of 20 steps", "resumed at 10") in good
        assert good > {("five steps", f"fp16, {loss}") for loss in ("loss_fn", "head_loss")}
        assert ("log-probabilities as in training", "torch.bfloat16, LoRA") in good


def test_what_is_cut_off_loses_no_row_before(tmp_path):
    """A part over its limit, a part that is killed, and the whole run in the middle of a part."""
    out, script = tmp_path / "rows.jsonl", tmp_path / "hanging.py"
    script.write_text(HANGING)
    words = ["late", "losses", "killed", "cut", "--device=cpu", f"--out={out}"]
    variables = {"PYTHONPATH": str(SCRIPT.parent)}
    with launch(script, words, log=tmp_path / "log", variables=variables) as job:
        job.wait_for(lambda: "killed" in rows_of(out, "a row"), "a row of the third part")
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
        os.kill(int(children.read_text()), signal.SIGKILL)
        job.wait_for(lambda: "cut" in rows_of(out, "a row"), "a row of the last part")
        os.killpg(job.process.pid, signal.SIGKILL)
        job.end()
    ends = rows_of(out, "the whole part")
    verdicts = {"late": "over its limit", "losses": "ok", "killed": "FAIL"}
    assert {part: row["verdict"] for part, row in ends.items()} == verdicts
    assert ends["killed"]["note"].endswith("exit code -9")
    losses = [row.get("entry") for row in rows_of(out) if row["part"] == "losses"]
    assert {"full logits", "forgekit"} < {*losses}
    assert "in hang" in out.with_suffix(".log").read_text(), "where the late part stood"


@pytest.mark.parametrize(("limit", "by"), first_of([(3, "fork")], [(60, "command")]))
def test_a_run_ends_within_its_limit_with_a_row_for_each_part(tmp_path, limit, by):
    out, began = tmp_path / "rows.jsonl", time.monotonic()
    words = ["--device=cpu", f"--limit={limit}", f"--out={out}"]
    with launch(SCRIPT, words, log=tmp_path / "log", by=by) as job:
        code = job.end()
    assert time.monotonic() - began < limit + 30, "a busy machine starts processes slowly"
    verdicts = [row["verdict"] for row in rows_of(out, "the whole part").values()]
    assert len(verdicts) == len(gpu.PARTS)
    assert {*verdicts} <= {"ok", "over its limit", "no time left"}
    assert code == ({*verdicts} != {"ok"})


@pytest.mark.oracle
@pytest.mark.timeout(1000)
def test_every_part_runs_on_a_cpu(tmp_path):
    """Beside Accelerate and the Trainer, and what was planned beside what is measured."""
    out, script = tmp_path / "rows.jsonl", tmp_path / "patient.py"
    script.write_text(PATIENT)
    options = {"log": tmp_path / "log", "cwd": tmp_path}
    options["variables"] = {"PYTHONPATH": str(SCRIPT.parent)}
    for words in (["plan", "--out=.gpu/plans.jsonl"], [f"--out={out}"]):
        with launch(script, ["--device=cpu", "--limit=900", *words], **options) as job:
            assert job.end() == 0, job.output
    ends = rows_of(out, "the whole part")
    assert {part: row["verdict"] for part, row in ends.items()} == dict.fromkeys(gpu.PARTS, "ok")
    good = {(r["part"], r.get("entry")) for r in rows_of(out) if r.get("verdict") == "ok"}
    assert good > {("eager", name) for name in ("Accelerate", "Trainer", "make_step, parallelize")}
    planned = [row["planned_gib"] for row in rows_of(out) if row.get("what") == "recipe"]
    assert [size > 0 for size in planned] == [True] * 2
