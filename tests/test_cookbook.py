"""Each script of the cookbook runs, and prints what its text claims."""

from __future__ import annotations

import functools
import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from pool import run_ranks
from runs import free_port, rank_variables

from forgekit.cli import main

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = DOCS / "cookbook"


def is_exact(difference, size):
    return difference < 1e-12 < size


CLAIMS = {
    "activations": lambda *n: len(n) == 6 * 5 and min(n[4::5]) > 0,
    "contrastive": lambda _, before, after: before < 0.3 and after > 0.6,
    "distillation": lambda first, last: 0 < last < first / 2,
    "ema": lambda weights, average: 0 < average < weights / 2,
    "frozen_parts": lambda *moved: moved == (0, 1e-4, 1e-3),
    "histograms": lambda n, none, _, m, zeros, small: n == m == 5712 and none < zeros < small < m,
    "images": lambda count, accuracy: count == 64 and accuracy > 0.9,
    "layer_norms": lambda *n: n[-2] == n[-1] > max(n[:-2]),
    "memory_table": lambda *n: n[-2] >= n[-1] == 5712 * 4,
    "multiple_choice": lambda *n: max(n[:2]) < 0.5 and min(n[2:]) > 0.9,
    "noise_scale": lambda s, _, g, __, scale, known: (
        abs(s - 9) < 1 and abs(g - 4) < 0.5 and abs(scale - known) < 0.35
    ),
    "other_set": lambda *n: n[0] == n[1] < 1 < n[2] == n[3],
    "own_attend": lambda change, _, reached: change < 1e-12 and reached == 6,
    "own_gpt": lambda *n: n[::2] == (1, 40) and n[3] < n[1] / 8,
    "own_loss": lambda ours, torchs, *n: ours == torchs and is_exact(*n),
    "own_model": lambda difference: difference < 1e-12,
    "own_optimizer": lambda first, last, *bad: last < first / 100 and bad == (1, 0),
    "own_parameters": lambda *n: n[::2] == (2, 2) and 0 < max(n[1::2]) < 1e-12,
    "own_source": lambda: True,
    "own_tracker": lambda *n: n[::3] == (10, 20, 30, 40) and n[-2] < n[1] / 10,
    "preemption": lambda google, _, __, amazon, azure: google == amazon == azure == 2,
    "profile_steps": lambda steps, losses, *_: (steps, losses) == (2, 4),
    "resume": lambda step, sample, loss: (step, sample) == (8, 64) and loss < 3.5,
    "rollouts": lambda low, high, first, last: (
        abs(low - 1) < 2e-3 and abs(high - 1) < 2e-3 and first < 0.6 and last > 0.9
    ),
    "sample_a_run": lambda steps, loss, *_: steps == 60 and loss < 1.2,
    "sources": lambda share, loss, parts: abs(share - 0.75) < 0.05 and loss == parts,
    "spikes": lambda none, without, one, limited: (none, one) == (0, 1) and limited < without / 5,
    "stored_teacher": lambda known, _, k, *n: (
        (k, n[0], n[5]) == (8, 0, 0) and known < 4.5 and n[4] < n[1] - 0.5 and n[9] < n[6] - 0.5
    ),
    "sweep": lambda *n: n[1] > n[3] > n[5] and n[-1] == n[4],
    "teacher_on_ranks": lambda *n: n[::2] == (10, 20, 30) and n[5] < n[1] / 2,
    "two_counts": is_exact,
    "two_processes": lambda *n: n[::3] == (1, 2, 3, 4, 5) and 3 < n[1] < 4,
}
"""By script: whether the numbers that it prints are as the text says."""


def run(name, folder):
    """What a script prints, in an empty folder."""
    os.chdir(folder)
    shown = io.StringIO()
    with redirect_stdout(shown), mock.patch.object(sys, "argv", [name]):
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return shown.getvalue()


def numbers(text):
    return tuple(map(float, re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", text)))


def test_every_script_is_on_the_page_and_is_tested():
    names = {path.stem for path in SCRIPTS.glob("*.py")}
    page = (DOCS / "cookbook.md").read_text()
    assert set(re.findall(r"^```\{literalinclude\} cookbook/(\w+)\.py$", page, re.M)) == names
    assert names == CLAIMS.keys()
    headings = re.findall(r"^## (.*)$", page, re.M)
    slugs = [heading.lower().replace(" ", "-") for heading in headings]
    linked = re.findall(r"\[\]\(#([\w-]+)\)", page)
    assert sorted(linked) == sorted(slugs)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What a script prints in one process; each is run once."""
    return functools.cache(lambda name: run(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", CLAIMS)
def test_a_script_prints_what_it_claims(name, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = output(name)
    assert CLAIMS[name](*numbers(shown)), shown
    assert "False" not in shown


def on_rank(rank, world, port, folder, name):
    with mock.patch.dict(os.environ, rank_variables(rank, world, port)):
        return run(name, folder)


@pytest.mark.oracle
@pytest.mark.parametrize("mesh", ["mesh.tp=2", "mesh.pp=2", "mesh.dp_shard=2"])
def test_the_gpt_of_the_cookbook_is_exact_in_a_layout(mesh, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [mesh, "global_batch_size=4", "batch_size=2"]
    code, shown = main(["verify", str(SCRIPTS / "own_gpt.py"), *given]), capsys.readouterr().out
    assert code == 0, shown
    (worst,) = re.findall(r"^equal: .* worst \S+ \((\S+)\)$", shown, re.M)
    assert "key.bias" not in worst  # whose gradient is zero: softmax does not see it


@pytest.mark.parametrize("name", ["two_processes", "teacher_on_ranks"])
def test_two_processes_print_what_one_does(name, output, tmp_path, monkeypatch):
    shown, nothing = run_ranks(on_rank, 2, free_port(), tmp_path, name, group=False)
    assert nothing == ""
    monkeypatch.chdir(tmp_path)
    for found, expected in zip(numbers(shown), numbers(output(name)), strict=True):
        assert found == pytest.approx(expected, abs=2e-5)
