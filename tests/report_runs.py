"""Run directories for reports, written by hand."""

from __future__ import annotations

import json

CONFIG = {"steps": 60, "phases": [{"step": 20}, {"start": 320}], "mesh": {"pp": 2}}
CONFIG |= {"pipeline_schedule": "interleaved_1f1b"}
MEASURED = {"perf/tokens_per_second": 1000.0, "perf/step_seconds": 90.0, "train/targets": 90_000}


def rows_of(count):
    return [
        {"step": step, "samples": 8 * step, "train/loss": 2 + 5 / step}
        | {"train/skipped": 0, "train/grad_norm": 1 / step, "train/lr": 1e-3 / step, **MEASURED}
        for step in range(1, count + 1)
    ]


def lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def write_run(out):
    """Write a run that had all that a run can have."""
    rows = rows_of(40)
    rows[9] |= {"train/loss": None, "train/skipped": 1}
    for row in rows[4::5]:
        row["moe/load/layers.1.feed_forward"] = [0.0, 1.0, 3.0]
        row["eval/held_out/loss"] = 2.5 + 1 / row["step"]
    for row in rows:
        row |= {f"source/{name}/loss": 2.0 + len(name) for name in ("code", "prose")}
        row["own/metric"] = row["step"] ** 2.0
    lines(out / "metrics.jsonl", rows)
    (out / "config.json").write_text(json.dumps(CONFIG))
    (out / "status.json").write_text('{"status": "failed", "reason": "OSError: <oh>", "step": 40}')
    started = {"event": "started", "ranks": 4, "device": "cuda", "parameters": 124_500_000}
    again = started | {"step": 25, "ranks": 8}
    history = [started | {"step": 0}, again, {"event": "failed", "step": 40}]
    lines(out / "history.jsonl", history)
    lines(out / "bad_steps.jsonl", [{"step": 10, "loss": None, "rows": [7], "spike": False}])
    (out / "samples").mkdir()
    (out / "samples" / "step_00000040.txt").write_text("def <b>f</b>(): \x1b[31m")
    return out
