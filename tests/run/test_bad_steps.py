"""Bad steps: what a policy makes of them, the way back, and what is written about them."""

from __future__ import annotations

from itertools import islice

import attrs
import pytest
import torch
from lab import alone, full_tensors, lay_out
from pool import run_ranks
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.metrics.records import read_bad_steps
from forgekit.run.bad_steps import BadStepError, bad_step_policy, roll_back

ROWS, BATCH = 96, 4


def row(step, skipped, in_a_row=0):
    return {"step": step, "train/skipped": skipped, "train/skipped_in_a_row": in_a_row}


def test_raise_counts_bad_steps_until_a_good_row():
    check = bad_step_policy("raise", patience=4)
    for number, skipped in enumerate([3, 0, 2, 1]):
        assert not check(row(number, skipped))
    assert not check(None)
    message = "4 bad steps .* up to step 40, 1 of them since the last row; patience is 4.*lower the"
    with pytest.raises(BadStepError, match=message):
        check(row(40, 1))


@pytest.mark.parametrize(("policy", "warned"), [("warn", [5, 2]), ("skip", []), ("roll_back", [])])
def test_the_other_policies_go_on_or_ask_for_bad_steps_one_after_another(policy, warned, caplog):
    check = bad_step_policy(policy, patience=3)
    asked = [check(one) for one in (row(10, 5, 2), None, row(20, 0, 0), row(30, 2, 3))]
    assert asked == [False, False, False, policy == "roll_back"]
    assert [int(message.split()[0]) for message in caplog.messages] == warned


def rows(broken=()):
    """Noisy lines; some of them are infinite."""
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1)
    y[list(broken)] = torch.inf
    return [TensorDict({"row": torch.tensor(row), "x": x[row], "y": y[row]}) for row in range(ROWS)]


def broken_rows(start, count):
    """The rows of some samples, in the order of a loader."""
    return [index for _, index in fk.make_loader(rows()).locate(start, start + count)]


def square_loss(model, batch):
    error = (model(batch["x"])[:, 0] - batch["y"]).square()
    return fk.Loss(error.sum(), error.numel())


def build(world=1):
    torch.manual_seed(0)
    return lay_out(nn.Linear(3, 1), build=sgd) if world > 1 else alone(nn.Linear(3, 1), sgd)


def sgd(model):
    return torch.optim.SGD(model.parameters(), momentum=0.9)


def train(dataset, steps, out=None, *, world=1, every=1, skips=()):
    """A recipe's loop; returns the state and the rows that each step saw."""
    state, seen = fk.donate(build(world), skips=skips), {}
    loader = fk.train_loader(state, dataset, BATCH // world, workers=1)
    step = fk.make_step(square_loss, schedule=fk.constant(0.05))
    check = bad_step_policy("roll_back", patience=3)
    is_writer = out is not None and fk.process_rank() == 0
    options = {"every": every, "loader": loader, "is_writer": is_writer, "start_samples": 0}
    groups = fk.groups(loader, loader.micro_batches(BATCH))
    with fk.MetricsLog(out or "", **options) as log, loader:
        while state.step < steps:
            batches = list(next(groups))
            seen[state.step] = [int(i) for b in batches for i in b["row"]]
            state, metrics = step(state, batches)
            if check(log(state, metrics)):
                state = roll_back(state, out / "checkpoints")
                loader.seek(state.samples, skip=state.skips)
                log.rewind(state)
            elif out and state.step % 4 == 0:
                fk.checkpoint_save(state, out / "checkpoints", keep=None, blocking=True)
    return state, seen


def _on_ranks(rank, world, out):
    state, _ = train(rows(broken_rows(28, 12)), 16, out, world=world)
    with pytest.raises(ValueError, match="step 16 was good, so there is nothing to roll back"):
        roll_back(state, out / "checkpoints")
    return state.skips, state.samples, int(state.targets), full_tensors(state.model)


def test_two_ranks_go_back_together_to_what_one_process_finds(tmp_path):
    here, there = run_ranks(_on_ranks, 2, tmp_path)
    expected, _ = train(rows(), 16, skips=((28, 12),))
    for skips, samples, targets, tensors in (here, there):
        assert (skips, samples, targets) == (((28, 12),), 64, 64)
        for name, tensor in full_tensors(expected.model).items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-6)
    steps = [row["step"] for row in fk.metrics.read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 17))


def bad_state(state=None, *, step, bad, skips=()):
    """A state of which so many last steps of four rows were bad."""
    since = {"skipped": torch.tensor(bad), "bad_since": torch.tensor(BATCH * (step - bad))}
    return fk.donate(state or build(), step=step, samples=BATCH * step, skips=skips, **since)


def test_a_way_back_counts_earlier_ones_and_keeps_what_they_left_out(tmp_path):
    """The checkpoint is older than they are."""
    fk.checkpoint_save(build(), tmp_path, blocking=True)
    state = bad_state(step=8, bad=2, skips=((16, 8), (32, 4)))
    with pytest.raises(BadStepError, match="would roll this run back again, after 2 times; 2"):
        roll_back(state, tmp_path, times=2)
    state = roll_back(state, tmp_path)
    assert (state.step, state.samples, state.skips) == (0, 0, ((16, 8), (32, 4), (24, 8)))


def test_checkpoints_of_the_bad_time_go_and_damaged_ones_are_passed_over(tmp_path):
    state = build()
    for step in (2, 4, 6, 8):
        state = bad_state(state, step=step, bad=max(step - 6, 0))
        fk.checkpoint_save(state, tmp_path, keep=None, blocking=True)
    (tmp_path / "step_00000006" / "manifest.json").write_text("{")
    next((tmp_path / "step_00000004").glob("*.safetensors")).write_bytes(b"")
    state = roll_back(state, tmp_path)
    assert (state.step, state.samples, state.skips) == (2, 8, ((24, 8),))
    left = sorted(path.name for path in tmp_path.glob("step*"))
    assert left == ["step_00000002", "step_00000006"]  # one without a manifest is nobody's
    assert (tmp_path / "latest").resolve().name == "step_00000002"


def test_without_a_good_checkpoint_there_is_no_way_back(tmp_path):
    state = bad_state(step=2, bad=2)
    with pytest.raises(BadStepError, match="no good checkpoint of step 0 or before; it has none"):
        roll_back(state, tmp_path)
    assert state.step == 2


def test_bad_steps_are_written_down_with_their_rows_and_sources(tmp_path):
    broken = broken_rows(20, 4) + broken_rows(32, 4)
    _, seen = train(rows(broken), 12, tmp_path / "one", every=3)
    found = read_bad_steps(tmp_path / "one")
    assert [(bad["step"], bad["samples"]) for bad in found] == [(6, [20, 24]), (9, [32, 36])]
    assert [bad["rows"] for bad in found] == [seen[5], seen[8]]
    assert [(bad["loss"], bad["spike"]) for bad in found] == [(None, False)] * 2
    order = fk.make_order({"a": ROWS, "b": ROWS})
    train(fk.mixture_dataset({"a": rows(), "b": rows(range(ROWS))}, order), 2, tmp_path)
    first, _ = read_bad_steps(tmp_path)
    assert list(zip(first["sources"], first["rows"], strict=True)) == [order(i) for i in range(4)]


def test_a_way_back_over_another_batch_size_leaves_out_the_samples_of_the_bad_steps(tmp_path):
    """Four steps of 4 rows, then steps of 12; bad are a part of the fourth and all later ones."""
    dataset, state = rows(broken_rows(14, 80)), build()
    step = fk.make_step(square_loss, schedule=fk.constant(0.05))
    for micro_batches in (1, 1, 3):
        with fk.train_loader(state, dataset, BATCH, workers=1) as loader:
            for batches in islice(fk.groups(loader, micro_batches), 2):
                state, _ = step(state, batches)
        fk.checkpoint_save(state, tmp_path, keep=None, blocking=True)
    assert (state.step, state.samples, int(state.skipped)) == (6, 40, 3)
    state = roll_back(state, tmp_path)
    assert (state.step, state.samples, state.skips) == (2, 8, ((12, 28),))


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Streaming(fk.TrainState):
    stream: object


class Endless:
    """A stream of rows without numbers."""

    def __iter__(self):
        return self

    def state_dict(self):
        return {"at": 3}

    def load_state_dict(self, state):
        raise AssertionError("nothing is to be loaded")


def test_a_way_back_with_a_stream_is_refused_before_anything_is_deleted(tmp_path):
    state = build()
    state = Streaming.create(state.model, state.optimizer, stream=Endless())
    for step in (1, 2):
        state = bad_state(state, step=step, bad=step - 1)
        fk.checkpoint_save(state, tmp_path, blocking=True)
    with pytest.raises(ValueError, match="rows of the stream 'stream' have no "):
        roll_back(state, tmp_path)
    assert len([*tmp_path.glob("step_*")]) == 2
    with fk.open_run(tmp_path / "run", {}) as run:
        run._loader = Endless()
        with pytest.raises(ValueError, match=r"^Endless has no seek\(\), so it cannot go"):
            run.roll_back(state)
