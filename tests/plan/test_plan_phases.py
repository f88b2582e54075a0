"""Of phases of batch size and length the one with the longest rows is planned."""

from __future__ import annotations

import json

from runs import arguments

from forgekit.cli.program import main

PHASES = (
    "{start=16,seq_len=16}",
    "{start=32,global_batch_size=32,seq_len=4}",
)


def test_a_plan_of_phases_is_that_of_the_one_with_the_longest_rows(tmp_path, capsys):
    def plan(seq_len, batch_size, **changes):
        given = {"data__seq_len": seq_len, "batch_size": batch_size, **changes}
        given |= {"out": tmp_path / "run", "data__path": tmp_path / "none", "steps": 8}
        command_line = [*arguments(**given), "--world", "1", "--json"]
        assert main(["plan", "pretrain", *command_line]) == 0
        shown = json.loads(capsys.readouterr().out)
        return {
            key: shown[key]
            for key in ("micro_batches", "targets_per_step", "flops_per_step", "ranks")
        }

    phased = plan(8, 4, global_batch_size=8, phases=f"[{','.join(PHASES)}]")
    assert phased == plan(16, 2, global_batch_size=8)
    assert (phased["micro_batches"], phased["targets_per_step"]) == (4, 128)
