"""The recipe of several sources: what changes at a phase, at which step, and what a stop leaves."""

from __future__ import annotations

import signal

import pytest
from runs import (
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

PEAK, ROWS = 0.01, 4
STEPS, FIRST, SECOND, DECAY = 80, 12, 60, 14
PHASES = (
    f"[{{step={FIRST}, weights={{mail=1}}, lr_scale=0.5}}, "
    f"{{step={SECOND}, weights={{asyncio=0, tables=1}}, lr_scale=0.25}}]"
)
SOURCES = {"asyncio": "await task {}", "mail": "Dear reader {},", "tables": "{}: 'LATIN LETTER'"}
SMALL = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 300}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments for a tiny run on three folders of texts, whose token files are made once."""
    folder = tmp_path_factory.mktemp("curriculum")
    for name, line in SOURCES.items():
        (folder / name).mkdir()
        for number in range(6):
            lines = [line.format(number * 100 + at) for at in range(20 + 10 * number)]
            (folder / name / f"{number}.txt").write_text("\n".join(lines))
    return [
        *(f"data.sources.{name}={folder / name}" for name in SOURCES),
        *(f"model.{name}={size}" for name, size in SMALL.items()),
        *("data.weights.asyncio=1", "data.weights.mail=0", "data.weights.tables=0"),
        *(f"data.path={folder / 'data'}", "data.seq_len=32", "data.workers=1"),
        *(f"steps={STEPS}", f"lr={PEAK}", "warmup=4", f"decay={DECAY}", f"phases={PHASES}"),
        *(f"global_batch_size={ROWS}", "batch_size=2", "log_every=1", "save_every=7"),
    ]


@pytest.fixture(scope="module")
def undisturbed(given, tmp_path_factory):
    """The run directory of a run that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_here("curriculum", [*given, f"out={out}"])
    return out


def test_the_rate_drops_at_the_step_that_holds_the_first_sample_of_a_phase(undisturbed):
    rates = {row["samples"] - ROWS: row["train/lr"] for row in rows_of(undisturbed)}
    assert list(rates) == list(range(0, STEPS * ROWS, ROWS))
    flat = [rate for first, rate in rates.items() if 4 * ROWS <= first < (STEPS - DECAY) * ROWS]
    before, between = FIRST - 4, SECOND - FIRST
    after = STEPS - DECAY - SECOND
    assert flat == [PEAK] * before + [PEAK * 0.5] * between + [PEAK * 0.25] * after
    assert rates[0] == PEAK / 4
    halfway = (STEPS - DECAY // 2) * ROWS
    assert rates[halfway] == pytest.approx(PEAK * 0.25 * (1 - 0.5**0.5))


def test_the_shares_of_the_sources_change_at_that_step(undisturbed):
    rows = rows_of(undisturbed)
    targets = [[row[f"source/{name}/targets"] for name in SOURCES] for row in rows]
    assert [sum(parts) for parts in targets] == [row["train/targets"] for row in rows]
    assert all(a > 0 and (b, c) == (0, 0) for a, b, c in targets[:FIRST])
    # A phase inherits nothing from the one before it: mail, which the second does not name, is off.
    assert all(c > 0 and (a, b) == (0, 0) for a, b, c in targets[SECOND:])
    both = targets[FIRST:SECOND]
    assert all(c == 0 for _, _, c in both)
    assert min(both[0][:2]) > 0  # in the first step of the phase, with this seed
    assert sum(a > 0 for a, _, _ in both) > 0.8 * len(both)
    assert 0.4 < sum(b for _, b, _ in both) / sum(a + b for a, b, _ in both) < 0.6
    for row, parts in zip(rows, targets, strict=True):
        losses = [row[f"source/{name}/loss"] for name in SOURCES]
        assert [loss is None for loss in losses] == [part == 0 for part in parts]
        total = sum(loss * part for loss, part in zip(losses, parts, strict=True) if part)
        assert total / sum(parts) == pytest.approx(row["train/loss"], rel=1e-6)


def test_a_run_that_is_stopped_inside_a_phase_goes_on_bitwise(given, undisturbed, tmp_path):
    out = tmp_path / "run"
    command_line = [*given, f"out={out}"]
    with launch("curriculum", command_line, log=tmp_path / "log") as job:
        job.wait_for(lambda: last_step(out) > FIRST + 1, f"step {FIRST + 1}")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0, job.output
    stopped = status_of(out)
    assert (stopped["status"], stopped["reason"]) == ("stopped", "SIGTERM")
    assert FIRST < stopped["step"] == saved_step(out) < SECOND
    run_here("curriculum", command_line)
    assert status_of(out)["status"] == "finished"
    assert_same_run(out, undisturbed)
    assert len({row["train/loss"] for row in results(out)}) == STEPS


def test_sources_that_are_given_take_the_place_of_the_default_ones(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} of a line\n" * 30)
    recipe = load_recipe("curriculum")
    sources = f"data.sources={{a='{tmp_path}/a', b='{tmp_path}/b'}}"
    given = [sources, f"data.path={tmp_path}/data", "data.seq_len=32", "phases=[]"]
    config = recipe.load_config(recipe.Config, given)
    recipe.write_token_files(config.data, 300)
    with pytest.raises(ValueError, match=r'^weights lack "a", "b"; give each'):
        recipe.build_dataset(config.data, [], 0)
    config = recipe.load_config(recipe.Config, [*given, "data.weights={a=1,b=3}"])
    order = recipe.build_dataset(config.data, [], 0).order
    assert order.sources == ("a", "b")
    assert order.shares(0, 2**20).tolist() == pytest.approx([0.25, 0.75], abs=0.01)


BAD = {
    "unknown source": (
        "phases=[{step=3, weights={mails=1}}]",
        f'error: the phase at sample {3 * ROWS}: weights name "mails"; the sources are '
        '"asyncio", "mail", "tables".',
    ),
    "order of phases": (
        "phases=[{step=3}, {step=3}]",
        "a phase at sample 12 follows one at sample 12",
    ),
    "missing weight": (
        "data.sources.more={folder}",
        'error: weights lack "more"; give each source a weight.',
    ),
    "no step": ("phases=[{weights={mail=1}}]", "phases[0].step: required, but not given"),
    "unknown key": (
        "phases=[{step=3, lr=0.1}]",
        "phases[0].lr: unknown key; the nearest is lr.",
    ),
    "no room": ("decay=77", "error: warmup 4 + decay 77 = 81 must fit into total 80"),
}


@pytest.mark.parametrize(("argument", "message"), BAD.values(), ids=BAD)
def test_a_mistake_exits_with_2_and_is_named(argument, message, given, tmp_path, capsys):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("\n".join(f"more of line {at}" for at in range(99)))
    argument = argument.replace("{folder}", str(tmp_path / "more"))
    places = [f"data.path={tmp_path / 'data'}", f"out={tmp_path / 'o'}"]
    with pytest.raises(SystemExit) as error:
        run_here("curriculum", [*given, *places, argument])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert rows_of(tmp_path / "o") == []


def test_what_is_prepared_is_not_prepared_again(given, undisturbed):
    recipe = load_recipe("curriculum")
    config = recipe.load_config(recipe.Config, given)
    index = config.data.path / "mail" / "index.json"
    before = index.stat().st_mtime_ns
    recipe.write_token_files(config.data, config.model.vocab_size)
    assert index.stat().st_mtime_ns == before
