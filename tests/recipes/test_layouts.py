"""One recipe in every layout, by configuration alone: the same losses as one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from covering import some_of
from ranks import run_ranks
from runs import arguments, results, run_here, status_of, tensors_of

STEPS = 6
ZBV = {"pipeline_schedule": "zbv", "model__tied": "false"}
LAYOUTS = {
    "tp 2": (2, {"mesh__tp": 2}),
    "ring 2": (2, {"mesh__cp": 2}),
    "ulysses 2": (2, {"mesh__cp": 2, "context_parallel": "ulysses"}),
    "pp 2": (2, {"mesh__pp": 2, "batch_size": 2, "model__tied": "false"}),
    "zbv 2": (2, {**ZBV, "mesh__pp": 2, "batch_size": 2, "model__layers": 4}),
    "tp 2 x fsdp 2": (4, {"mesh__tp": 2}),
    "tp 2 x ring 2, recomputed": (4, {"mesh__tp": 2, "mesh__cp": 2}),
}


def command_line(out, tokens, **settings):
    given = {"steps": STEPS, "data__doc_ids": "true", "eval_every": 3, "model__tied": "true"}
    return arguments(out=out, data__path=tokens, **given | settings)


def _train(rank, world, folder, tokens, settings):
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run_here("pretrain", command_line(folder / "run", tokens, **settings))


@pytest.fixture(scope="module")
def alone(tokens, tmp_path_factory):
    """The run directory of one process that trains the model of a layout; made once."""
    made = {}

    def run(settings):
        model = {key: value for key, value in settings.items() if key.startswith("model")}
        if (key := str(model)) not in made:
            made[key] = tmp_path_factory.mktemp("alone") / "run"
            run_here("pretrain", command_line(made[key], tokens, **model))
        return made[key]

    return run


@pytest.mark.parametrize("name", some_of(LAYOUTS, *LAYOUTS.keys() - {"ulysses 2"}))
def test_losses_are_those_of_one_process(name, tokens, tmp_path, alone):
    world, settings = LAYOUTS[name]
    recompute = {"activation_checkpoint": "full"} if "recomputed" in name else {}
    one = alone(settings)
    run_ranks(_train, world, tmp_path, tokens, settings | recompute, group=False)
    assert status_of(tmp_path / "run")["status"] == "finished"
    expected, found = results(one), results(tmp_path / "run")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for theirs, ours in zip(found, expected, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5)
    assert "eval/heldout/loss" in found[-1]
    wanted, saved = tensors_of(one), tensors_of(tmp_path / "run")
    assert saved.keys() == wanted.keys()
    for key in (key for key in wanted if key.startswith("model.")):
        assert (saved[key] - wanted[key]).abs().max() < 1e-4
