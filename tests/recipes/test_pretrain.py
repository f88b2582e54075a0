"""Real processes and real signals: what is stopped or killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch.distributed as dist
from covering import some_of
from ranks import run_ranks
from runs import (
    arguments,
    assert_same_run,
    last_step,
    launch,
    load_recipe,
    results,
    rows_of,
    run_here,
    saved_step,
    status_of,
)

import forgekit as fk
from forgekit.cli import main, recipes_folder
from forgekit.config import structure, to_dict

STEPS = 100
AHEAD = 8
"""Steps to watch before a signal: more than ``save_every``, so that each part commits a save."""


def command_line(out, tokens, **settings):
    return arguments(out=out, data__path=tokens, steps=STEPS, model__dropout=0.1, **settings)


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    """The run directory of one process that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_here("pretrain", command_line(out, tokens))
    return out


def _train(rank, world, folder, tokens):
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run_here("pretrain", command_line(folder / "run", tokens))


@pytest.fixture(scope="module")
def undisturbed_pair(tokens, tmp_path_factory):
    """The run directory of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("pair")
    run_ranks(_train, 2, folder, tokens, group=False)
    return folder / "run"


def go_on(job, out, start):
    """Wait until a run has done some steps beyond ``start`` and committed a checkpoint of one."""
    job.wait_for(
        lambda: last_step(out) >= start + AHEAD and saved_step(out) > start,
        f"step {start + AHEAD} and a checkpoint after step {start}",
    )


def assert_stopped(job, out, reason):
    """Check that a run ended cleanly: all agree on the step, and it is saved."""
    status = status_of(out)
    assert (status["status"], status["reason"]) == ("stopped", reason), job.output
    assert status["step"] == saved_step(out) == last_step(out) < STEPS
    assert status["samples"] == 8 * status["step"]


SIGNALS = (signal.SIGTERM, "command"), (signal.SIGINT, "fork"), (signal.SIGKILL, "fork")


@pytest.mark.oracle
def test_one_process_resumes_bitwise_after_signals(tmp_path, tokens, undisturbed):
    """Ctrl-C has tests in shells, and kills and SIGTERM have theirs in the chaos suite."""
    out, log = tmp_path / "run", tmp_path / "log"
    start = 0
    for number, by in SIGNALS:
        with launch("pretrain", command_line(out, tokens), log=log, by=by) as job:
            go_on(job, out, start)
            job.process.send_signal(number)
            code = job.end()
            assert f"step {start}, sample {8 * start};" in job.output
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL
            assert status_of(out)["status"] == "running"
        else:
            assert code == 0, job.output
            assert_stopped(job, out, signal.Signals(number).name)
        start = saved_step(out)
    with launch("pretrain", command_line(out, tokens), log=log) as job:
        assert job.end() == 0, job.output
        assert f"step {start}, sample {8 * start};" in job.output
    assert status_of(out)["status"] == "finished"
    assert_same_run(out, undisturbed)


@pytest.mark.oracle
def test_two_ranks_resume_bitwise_after_signals(tmp_path, tokens, undisturbed_pair):
    """By torchrun: once with Slurm, and with every signal in the chaos suite."""
    out, log = tmp_path / "run", tmp_path / "log"
    start = 0
    for number, _ in SIGNALS:
        with launch("pretrain", command_line(out, tokens), log=log, ranks=2) as job:
            go_on(job, out, start)
            for rank in job.ranks:
                rank.send_signal(number)
            code = job.end()
            assert f"step {start}, sample {8 * start};" in job.output
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL
            assert status_of(out)["status"] == "running"
        else:
            assert code == 0, job.output
            assert_stopped(job, out, number.name)
        start = saved_step(out)
    with launch("pretrain", command_line(out, tokens), log=log, ranks=2) as job:
        assert job.end() == 0, job.output
    assert status_of(out)["status"] == "finished"
    assert_same_run(out, undisturbed_pair)


def test_a_second_run_in_the_same_directory_is_refused(tmp_path, tokens):
    out = tmp_path / "run"
    with launch("pretrain", command_line(out, tokens), log=tmp_path / "first") as first:
        go_on(first, out, start=0)
        first.process.send_signal(signal.SIGSTOP)
        before = {name: (out / name).read_bytes() for name in ("config.json", "status.json")}
        again = command_line(out, tokens, seed=1)
        with launch("pretrain", again, log=tmp_path / "second") as second:
            assert second.end() == 1
        holder = f"error: {out} is in use by pid {first.process.pid} on host "
        assert second.output.startswith(holder), "a message and no traceback"
        assert {name: (out / name).read_bytes() for name in before} == before
        first.process.send_signal(signal.SIGUSR1)
        first.process.send_signal(signal.SIGCONT)
        assert first.end() == 0, first.output
    assert_stopped(first, out, "SIGUSR1")


def test_a_run_directory_holds_what_happened(undisturbed):
    names = {path.name for path in undisturbed.iterdir()} - {".lock"}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "status.json",
        "history.jsonl",
        "checkpoints",
        "loss.png",
        "report.html",
    }
    saved = {path.name for path in (undisturbed / "checkpoints").iterdir()}
    assert saved == {f"step_{step:08d}" for step in (STEPS - 10, STEPS - 5, STEPS)} | {"latest"}
    assert (undisturbed / "checkpoints" / "latest").readlink().name == f"step_{STEPS:08d}"
    config = json.loads((undisturbed / "config.json").read_text())
    recipe = load_recipe("pretrain")
    assert to_dict(structure(recipe.Config, config)) == config
    assert (config["steps"], config["model"]["dropout"]) == (STEPS, 0.1)
    assert status_of(undisturbed)["status"] == "finished"


def test_held_out_text_is_measured_in_bits_per_byte(undisturbed, tokens):
    *others, last = results(undisturbed)
    assert not any("eval/heldout/loss" in row for row in others)
    held_out = fk.data.open_tokens(tokens / "heldout")
    assert last["eval/heldout/targets"] == held_out.tokens - 1
    bits = last["eval/heldout/loss"] * held_out.tokens / held_out.metadata["text_bytes"]
    assert last["eval/heldout/bits_per_byte"] == pytest.approx(bits / math.log(2), rel=1e-12)
    first = rows_of(undisturbed)[0]["train/loss"]
    assert last["eval/heldout/loss"] < 0.5 * first, "it has learned nothing"


REFUSED = {
    "two mistakes": (["steps=a", "seed=b"], 'seed: expected int, read "b" (str).'),
    "heads that do not divide": (
        ["model.heads=5"],
        "model.head_dim: dim 32 must be divisible by 2 * heads",
    ),
    "a mesh of nothing": (["mesh.dp_replicate=0"], "mesh: dp_replicate is 0; a mesh dimension is"),
    "too many ranks": (["mesh.dp_shard=3"], "error: dp_shard 3 = 3 does not fit 1 rank; "),
    "a global batch that does not divide": (
        ["global_batch_size=10"],
        "error: global_batch_size 10 must be divisible by batch_size 4 * 1 data-parallel ranks = 4;"
        " the nearest are 8 and 12, or batch_size 2.",
    ),
    "a vocabulary that is too small": (
        ["model.vocab_size=63"],
        "error: vocab_size 63 of the model is below the 64 of ",
    ),
    "data that is not there": (
        ["data.path=nowhere"],
        "error: nowhere is not a token file: it has no index.json. ",
    ),
    "a device that is not there": (
        ["device=abacus"],
        "error: device is 'abacus' and torch finds no such device here; it finds ",
    ),
    "attention that the device has not": (
        ["attention=varlen", "device=cpu"],
        "error: attention is 'varlen', and cpu has no aten::_flash_attention_forward for it. For ",
    ),
    "rows longer than the model takes": (
        ["data.seq_len=17"],
        "error: seq_len 17 of the data is above max_seq_len 16 of the model; set data.seq_len=16",
    ),
    "spikes above nothing": (["spikes=0"], "error: 'sigmas' must be > 0: 0.0"),
    "gradients clipped to nothing": (["max_norm=0"], "error: max_norm is 0.0; it must be positive"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_be_is_refused_before_it_starts(case, tmp_path, tokens, capsys):
    given, sentence = REFUSED[case]
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as exit_:
        run_here("pretrain", [*arguments(out=out, data__path=tokens, steps=20), *given])
    shown = capsys.readouterr().err
    assert exit_.value.code == 2, shown
    assert any(line.strip().startswith(sentence) for line in shown.splitlines()), shown
    assert not (out / "metrics.jsonl").exists()
    assert not (out / "checkpoints").exists()


def test_a_run_that_has_ended_well_stays_so_without_its_picture(tmp_path, tokens, capsys):
    (tmp_path / "loss.png").mkdir()
    (tmp_path / "report.html").mkdir()
    run_here("pretrain", arguments(out=tmp_path, data__path=tokens, steps=1))
    shown = capsys.readouterr().err
    assert f"no loss curve: [Errno 21] Is a directory: '{tmp_path}" in shown
    assert f"{tmp_path / 'report.html'}" in shown
    assert status_of(tmp_path)["status"] == "finished"


LOOP = "            if must_roll_back(log(state, metrics)):\n"
EVALUATION = "fk.evaluate(state, held_out, "
STOPS = {
    "after the step": (LOOP, f"            if state.step == 1: fk.alarm()\n{LOOP}"),
    "in its midst": (EVALUATION, "fk.evaluate(state, map(fk.alarm, held_out), "),
}
"""What is put into a recipe that is stopped when the evaluation after step 4 is due."""


@pytest.mark.parametrize("moment", some_of(STOPS, "after the step"))
def test_an_evaluation_that_a_stop_cuts_short_is_made_up_for(moment, tmp_path, tokens, monkeypatch):
    def alarm(batch=None):
        signal.raise_signal(signal.SIGTERM)
        return batch

    monkeypatch.setattr(fk, "alarm", alarm, raising=False)
    settings = {"data__path": tokens, "steps": 8, "eval_every": 4, "save_every": 3}
    run_here("pretrain", arguments(out=tmp_path / "straight", **settings))
    text = (recipes_folder() / "pretrain.py").read_text()
    assert text.count(STOPS[moment][0]) == 1
    (tmp_path / "stops.py").write_text(text.replace(*STOPS[moment]))
    command = ["run", "stops", *arguments(out=tmp_path / "run", **settings)]
    assert main(command, recipes=tmp_path) == 0
    assert (status_of(tmp_path / "run")["status"], saved_step(tmp_path / "run")) == ("stopped", 4)
    assert not any("eval/heldout/loss" in row for row in rows_of(tmp_path / "run"))

    run_here("pretrain", arguments(out=tmp_path / "run", **settings))
    evaluated = [row["step"] for row in rows_of(tmp_path / "run") if "eval/heldout/loss" in row]
    assert evaluated == [4, 8]
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_what_a_resumed_run_does_differently_is_written_down(tmp_path, tokens, capsys):
    """The seed is one of the things that stay: the checkpoint has it."""
    out = tmp_path / "run"
    run_here("pretrain", arguments(out=out, data__path=tokens, steps=2, seed=3))
    capsys.readouterr()
    changed = {"steps": 4, "seed": 5, "optim__lr": 1e-3, "prompt": '"\\u001b[31m"'}
    run_here("pretrain", arguments(out=out, data__path=tokens, **changed))
    shown = capsys.readouterr().err
    config = json.loads((out / "config.json").read_text())
    assert (config["seed"], config["steps"], config["optim"]["lr"]) == (3, 4, 1e-3)
    (record,) = map(json.loads, (out / "config_changes.jsonl").read_text().splitlines())
    assert (record["step"], record["samples"]) == (2, 16)
    assert record["changed"] == {
        "steps": [2, 4],
        "prompt": ["def ", "\x1b[31m"],
        "optim.lr": [3e-3, 1e-3],
    }
    assert f"{out}: configuration changed: steps 2 -> 4, prompt" in shown
    assert "optim.lr 0.003 -> 0.001\n" in shown
    assert "\x1b" not in shown
    run_here("pretrain", arguments(out=out, data__path=tokens, **changed))
    assert len((out / "config_changes.jsonl").read_text().splitlines()) == 1


def test_a_run_of_no_steps_ends_well(tmp_path, tokens, capsys):
    run_here("pretrain", arguments(out=tmp_path, data__path=tokens, steps=0))
    assert "all 0 steps are done already" in capsys.readouterr().err
    assert status_of(tmp_path)["status"] == "finished"


def test_a_refusal_is_exit_code_2_and_a_sentence(tmp_path, tokens):
    given = arguments(out=tmp_path / "run", data__path=tokens, global_batch_size=10)
    with launch("pretrain", given, log=tmp_path / "log") as job:
        assert job.end() == 2
    assert len(job.output.splitlines()) == 1
    assert status_of(tmp_path / "run")["status"] == "failed"
