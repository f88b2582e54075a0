"""The parts of ``gpu.py``: functions of a device that yield rows; what fails is a row too."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import side_by_side
import torch
from bare import Size, bare_step, head_loss, loss_fn, our_step
from dry_run import SEVEN_BILLION, dry_run, real_step
from losses import FULL, WAYS, LossSize, train
from pairs import band, peak, ratio, take_turns, turn

import forgekit as fk
from forgekit.config import load_config, to_dict
from forgekit.metrics.flops import Flops
from forgekit.model.attention import Documents, attend_causal
from forgekit.model.attention_kernels import ORDER, choose, why_not

Row = dict[str, Any]
Rows = Iterator[Row]
Entries = dict[str, Callable[[], Any]]
GIB, PREPARED = 2**30, Path(".gpu")
ABSENT = "not on this device"
PACKAGES = {"accelerate", "lightning", "transformers"}
"""What may be missing."""
sys.path.append(str(Path(__file__).parent.parent / "tests"))


def rows_of(part: str, device: str) -> Rows:
    """Run a part of ``gpu.PARTS``: the function of that name."""
    torch.set_float32_matmul_precision("high")
    for row in guarded(device, "the rest of it", "", globals()[part](device)):
        yield {"part": part, **row}


# ---- does it run, and is it right


def smoke(device: str) -> Rows:
    yield _row("device", getattr(_module(device), "get_device_name", lambda: device)(), "-")
    for precision in ("fp32", "bf16", "fp16"):
        yield from guarded(device, "five steps", precision, _five_steps(device, precision))
    yield from guarded(device, "recipe of 20 steps", "resumed at 10", _resumed(device))


def _five_steps(device: str, precision: Any) -> Rows:
    size, mesh = Size(64, 2, seq_len=32, vocab_size=128), fk.build_mesh(device=device)
    for loss in (loss_fn, head_loss):
        model = fk.parallelize(size.model(), mesh, precision=precision)
        step = our_step(model, size.batches(device), loss, mesh)
        losses = [float(step()) for _ in range(5)]
        entry = f"{precision}, {loss.__name__}"
        yield _row("five steps", entry, losses[-1] < losses[0], losses=losses)


def _resumed(device: str) -> Rows:
    """Train, lose the last checkpoint, and go on from the one before."""
    runs: list[list[Row]] = []
    with tempfile.TemporaryDirectory() as folder:
        words = ["steps=20", "save_every=10", "eval_every=0", "log_every=1"]
        recipe, config = _configured(device, [*_words("test"), *words], folder)
        for _ in range(2):
            with fk.open_run(config.out, to_dict(config)) as run:
                recipe.train(config, run)
            rows = fk.metrics.read_metrics(config.out / "metrics.jsonl")
            runs.append([row for row in rows if "train/loss" in row])
            shutil.rmtree(fk.latest_checkpoint(config.out / "checkpoints"))
    first, again = ([row["train/loss"] for row in rows] for rows in runs)
    apart = max(abs(a - b) for a, b in zip(first, again, strict=True))
    # Rows have times, so equal ones were kept and the others trained again.
    is_resumed = [a == b for a, b in zip(*runs, strict=True)] == [True] * 10 + [False] * 10
    is_good = is_resumed and apart <= 1e-3 * first[0]
    yield _row("recipe of 20 steps", "resumed at 10", is_good, f"{apart:.1e} apart", losses=first)


def exact(device: str) -> Rows:
    from device.test_one_process import two_steps

    for name, error, most in two_steps(device):
        note = f"{error:.1e}, at most {most:.0e}"
        yield _row("two steps as on the CPU", name, error <= most, note)
    for loss in (loss_fn, head_loss):
        yield from guarded(device, "no wait of the host", loss.__name__, _waits(device, loss))


def _waits(device: str, loss: Any) -> Rows:
    """Take a step where whatever makes the host wait is an error."""
    if not hasattr(_module(device), "set_sync_debug_mode"):
        yield _row("no wait of the host", loss.__name__, ABSENT)
        return
    size = Size(64, 1, seq_len=32, vocab_size=128)
    batches = [b.apply(lambda ids: ids.contiguous().pin_memory()) for b in size.batches()]
    step = our_step(size.model(device), batches, loss)
    step()
    _module(device).set_sync_debug_mode("error")
    try:
        step()
    finally:
        _module(device).set_sync_debug_mode("default")
    yield _row("no wait of the host", loss.__name__, True)


def on_policy(device: str) -> Rows:
    """Find log-probabilities of sampling again in training, bit for bit, and what that costs."""
    from evaluation.test_on_policy import ADAPTERS, DTYPES, build, differing, prompts_of

    for dtype in DTYPES:
        for name, lora in ADAPTERS.items():
            prompts = [prompt.to(device) for prompt in prompts_of(_pick(device, 3, 20))]
            model, new = build(dtype, lora).to(device), _pick(device, 2, 100)
            total, differ = differing(model, prompts, max_new_tokens=new)
            what, note = "log-probabilities as in training", f"{differ} of {total} differ"
            yield _row(what, f"{dtype}, {name}", not any(differ), note)
    size = _pick(device, *(sizes["tiny"][0] for sizes in (TEST, SIZES)))
    mesh, entries = fk.build_mesh(device=device), {}
    for name in ("ordinary", "ordinary again", "batch_invariant"):
        is_on = name == "batch_invariant"
        model = fk.parallelize(size.model(), mesh, precision="bf16", batch_invariant=is_on)
        entries[name] = bare_step(model, size.batches(device))
    yield from compared(device, "step, bf16", entries, size.tokens, {"batch_invariant": 3.0})


# ---- how fast is it, and how much memory does it take

SIZES = {
    "small": (Size(768, 12, 1024, 32768, heads=12, rows=8, micro_batches=2), 4, 1.02),
    "tiny": (Size(256, 4, 256, 8192, micro_batches=2), 10, 1.2),
    "medium": (Size(1536, 12, 2048, 32768, heads=12, micro_batches=2), 2, 1.02),
}
"""Of a step beside others: model and batches, steps of a turn, and the bound of ``make_step``. The
tiny one takes as long as the host does, for which docs/performance.md has another bound."""
TEST = {"tiny": (Size(32, 1, 16, 64, rows=2, micro_batches=2), 1, 1.2)}


def beside(mode: str, device: str) -> Rows:
    """Compare a step by hand, in forgekit and in other libraries."""
    is_known, ways = device in ("cpu", "cuda"), side_by_side.OURS
    if device != "cuda" if mode == "graphs" else mode == "compiled" and not is_known:
        yield _row(f"step, {mode}", "", ABSENT)
        return
    if mode == "graphs":
        ways = {name: lambda task, b=b: side_by_side.captured(b(task)) for name, b in ways.items()}
    else:
        ways = ways | (side_by_side.THEIRS if is_known else {}) | side_by_side.LAST
    backend = _pick(device, "eager", "inductor") if mode == "compiled" else None
    for name, (size, times, most) in _pick(device, TEST, SIZES).items():
        task, what = side_by_side.Task(size, device, backend), f"step, {name}, {mode}"
        with task.closing:
            yield from guarded(device, what, "", _loops(task, what, ways, times, most))
        fk.shutdown()


def _loops(task: Any, what: str, ways: dict[str, Any], times: int, most: float) -> Rows:
    steps: Entries = {}
    first: dict[str, list[float]] = {}

    def prepare(name: str) -> Rows:
        step = ways[name](task)
        first[name], steps[name] = [float(step()), float(step())], step
        yield from ()

    for name in ways:
        yield from guarded(task.device, what, name, prepare(name))
    bounds = {side_by_side.STEP: most}
    for row in compared(task.device, what, steps, task.size.tokens, bounds, times):
        pairs = zip(first[row["entry"]], first[side_by_side.BARE], strict=True)
        is_same = all(abs(a - b) <= 1e-3 * b for a, b in pairs)
        yield row | {"losses": first[row["entry"]]} | ({} if is_same else {"verdict": "FAIL"})


eager, compiled, graphs = (partial(beside, mode) for mode in ("eager", "compiled", "graphs"))

SHAPES = {
    "test": (32, 2, 2, 1, 64, 64, 4096, 2),
    "0.5B": (1536, 16, 12, 4, 4096, 4096, 32768, 8),
    "1B": (2048, 22, 32, 4, 5632, 4096, 32768, 4),
    "3B": (3072, 26, 24, 8, 8192, 4096, 32768, 2),
    "7B:14": (4096, 14, 32, 32, 11008, 4096, 32768, 2),
}
"""Sizes of a model as ``_words`` names them, and the rows of a micro-batch; 14 layers of 7B."""
SETUPS = (
    "1B compile=true activation_checkpoint=selective",
    "1B",
    "0.5B compile=true",
    "1B compile=true activation_checkpoint=selective data.doc_ids=true",
    "7B:14 compile=true activation_checkpoint=selective",
    "3B compile=true activation_checkpoint=selective",
    "1B compile=true activation_checkpoint=full",
)
TEST_SETUPS = ("test activation_checkpoint=selective", "test data.doc_ids=true")


def _words(setup: str) -> list[str]:
    """Settings of the pretrain recipe."""
    shape, *words = setup.split()
    names = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "max_seq_len", "vocab_size")
    *sizes, rows = SHAPES[shape]
    words += [f"model.{name}={size}" for name, size in zip(names, sizes, strict=True)]
    words += [f"data.seq_len={sizes[-2]}", f"batch_size={rows}", f"global_batch_size={2 * rows}"]
    return [*words, "model.tied=false", "precision=bf16"]


def _configured(device: str, words: list[str], folder: str) -> tuple[Any, Any]:
    from runs import load_recipe

    data, recipe = PREPARED / "data", load_recipe("pretrain")
    if not data.exists():
        data = Path(folder) / "data"
        documents = (np.arange(n, n + 400) % 4095 for n in range(_pick(device, 60, 10_000)))
        fk.write_tokens(data, documents, vocab_size=4096, eos_id=4095)
    words = [*words, f"data.path={data}", f"out={folder}/run", f"device={device}"]
    return recipe, load_config(recipe.Config, words)


def plan(device: str) -> Rows:
    """Predict what ``mfu`` measures, as on an H100."""
    from forgekit.cli import main

    for setup in _pick(device, TEST_SETUPS, SETUPS):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            main(["plan", "pretrain", *_words(setup), "data.path=none", "--json"])
        found = json.loads(text.getvalue())
        peak = max(rank["memory"]["peak"] for rank in found["ranks"]) / GIB
        yield _row("plan", setup, "-", ms=found["step_seconds"] * 1e3, peak_gib=peak)


def mfu(device: str) -> Rows:
    """Train set-ups of the pretrain recipe, and put what was planned beside what is measured.

    MFU is a share of the rate of a large product; operations that are repeated do not count.
    """
    n = _pick(device, 32, 8192)
    a, b = (torch.randn(n, n).to(device, torch.bfloat16) for _ in range(2))
    times = take_turns({"": turn(lambda: a @ b, device)}, 10)[""]
    best = 2 * n**3 / min(times)
    yield _row("product in bf16", f"{best / 1e12:.1f} TFLOP/s", "-")
    path = PREPARED / "plans.jsonl"
    plans = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    planned = {row["entry"]: row for row in plans if row.get("what") == "plan"}
    for setup in _pick(device, TEST_SETUPS, SETUPS):
        rows = _trained(device, setup, best, planned.get(setup, {}))
        yield from guarded(device, "recipe", setup, rows)


def _trained(device: str, setup: str, best: float, planned: Row) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        recipe, config = _configured(device, _words(setup), folder)
        built = recipe.setup(config)
        state, count = built.state, _pick(device, 2, 8)
        with built.loader, built.stop:
            micro_batches = built.loader.micro_batches(config.global_batch_size)
            groups = iter(fk.groups(built.loader, micro_batches))

            def step() -> None:
                nonlocal state
                state, _ = built.step(state, next(groups))

            turn(step, device, 3)()
            highest, began = peak(step, device, growth=False), time.perf_counter()
            turn(step, device, count)()
            seconds = (time.perf_counter() - began) / count
    positions, rows = config.data.seq_len, config.global_batch_size
    pairs = positions * (positions + 1) / 2  # more than there are where documents are apart
    flops = Flops.of(state.model).of_row(positions, pairs) * rows
    numbers = {"ms": seconds * 1e3, "peak_gib": highest, "mfu": flops / seconds / best}
    numbers |= {"planned_ms": planned.get("ms"), "planned_gib": planned.get("peak_gib")}
    yield _row("recipe", setup, "-", tokens_per_second=positions * rows / seconds, **numbers)


def kernels(device: str) -> Rows:
    """Compare what attends inside packed documents: each kernel that the device runs, forced."""
    rows, positions, channels = _pick(device, (1, 16, 8), (4, 4096, 128))
    host = (torch.arange(positions) * 5 // positions).expand(rows, -1).contiguous()
    ids, documents = host.to(device), Documents()
    documents.note(ids, host)  # as a step does, so that nothing is read back
    what = f"attention, {rows} x {positions}, 5 documents each, bf16"
    here = ids.device, torch.bfloat16, channels
    shapes = [(rows, positions, heads, channels) for heads in (16, 4, 4)]
    inputs = [torch.randn(shape).to(device, torch.bfloat16).requires_grad_() for shape in shapes]

    def run(kernel: Any) -> None:
        out = attend_causal(*inputs, doc_ids=ids, attention=kernel, documents=documents)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    entries: Entries = {"sdpa": partial(run, "sdpa"), "sdpa again": partial(run, "sdpa")}
    for kernel in ORDER["documents"]:
        if why := why_not(kernel, *here):
            yield _row(what, kernel, ABSENT, why)
        else:
            entries[kernel] = partial(run, kernel)
    found = list(compared(device, what, entries, rows * positions))
    best = min(row["ratio"] for row in found)
    for row in found:
        if row["entry"] == choose("documents", *here):
            is_best = _pick(device, True, row["ratio"] <= best * 1.1 + row["band"])
            row |= _row(what, row["entry"], is_best, "what auto takes")
        yield row


def losses(device: str) -> Rows:
    """Compare ways from hidden states to a loss; all logits take 6 GB three times over."""
    sizes = _pick(device, (16, 8, 32), (8192, 2048, 131072))
    size = LossSize(*sizes, device=device, dtype=_pick(device, torch.float32, torch.bfloat16))
    names = (FULL, "again", *(name for name in WAYS if name != FULL))
    entries = {name: train(FULL if name == "again" else name, size) for name in names}
    what = f"loss, {size.tokens} x {size.dim} -> {size.vocab_size}"
    yield from compared(device, what, entries, size.tokens, {"forgekit": 1.05})


def sampling(device: str) -> Rows:
    """Generate greedily from kept keys and values, beside transformers with the same weights."""
    from test_generate import SPEC, in_transformers, text_of

    changes = {"vocab_size": 32768, "dim": 2048, "layers": 16, "heads": 16, "ffn_dim": 5632}
    spec, new = _pick(device, (SPEC, 4), (attrs.evolve(SPEC, **changes), 128))
    model = fk.Transformer(spec).to(device, _pick(device, torch.float32, torch.bfloat16))
    with tempfile.TemporaryDirectory() as folder:
        theirs = in_transformers(model, Path(folder))
    for rows in (1, 16):
        prompt = text_of(rows, 32, spec).to(device)
        ours = partial(fk.generate, model, prompt, max_new_tokens=new, temperature=0)
        entries = {"forgekit": ours, "again": ours, "transformers": partial(theirs, prompt, new)}
        same = float((ours() == theirs(prompt, new)).float().mean())
        for row in compared(device, f"{new} new tokens, {rows} rows", entries, rows * new):
            yield row | {"same_tokens": same}


def memory(device: str) -> Rows:
    """Compare the peak of a step in float32 with what fake tensors predict, recomputed in full."""
    spec = Size(32, 1, seq_len=16, vocab_size=64).model().spec
    if _pick(device, False, True):
        # A layer has 3.1 GiB of parameters, gradients and moments; all else takes 6.
        layers = int((0.85 * _module(device).mem_get_info()[1] / GIB - 6) / 3.1)
        spec = attrs.evolve(SEVEN_BILLION, layers=max(1, min(layers, SEVEN_BILLION.layers)))
    predicted, step = dry_run(spec, 1, device).peak / GIB, real_step(spec, 1, device)
    step()
    found, is_close, note = peak(step, device, growth=False), ABSENT, ""
    if found is not None:
        is_close = abs(found / predicted - 1) <= 0.05
        note = f"{found / predicted:.3f} of {predicted:.2f} GiB predicted"
    yield _row("memory of a step, recomputed", f"{spec.layers} layers", is_close, note)


# ---- how it is measured


def _row(what: str, entry: str, verdict: bool | str, note: str = "", **numbers: Any) -> Row:
    shown = verdict if isinstance(verdict, str) else "ok" if verdict else "FAIL"
    return {"what": what, "entry": entry, "verdict": shown, "note": note, **numbers}


def guarded(device: str, what: str, entry: str, rows: Iterable[Row]) -> Rows:
    """Yield rows; what raises ends these and not those that follow."""
    try:
        yield from rows
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        is_missing = str(getattr(error, "name", "")).partition(".")[0] in PACKAGES
        is_full = isinstance(error, torch.OutOfMemoryError)
        verdict = "missing" if is_missing else "does not fit" if is_full else "FAIL"
        note = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        yield _row(what, entry, verdict, note)
    gc.collect()
    getattr(_module(device), "empty_cache", gc.collect)()


def compared(
    device: str,
    what: str,
    entries: Entries,
    tokens: int,
    most: dict[str, float] | None = None,
    times: int = 1,
) -> Rows:
    """Take turns with the first entry, which the second one repeats; ``most`` bounds ratios."""
    first, again, *_ = entries
    peaks = {name: peak(run, device) for name, run in entries.items()}
    turns = {name: turn(run, device, times) for name, run in entries.items()}
    taken = take_turns(turns, *_pick(device, (1,), (10,)), warmup=_pick(device, 0, 2))
    noise = band(taken, again, first)
    for name in entries:
        over, seconds = ratio(taken, name, first), statistics.median(taken[name]) / times
        bound = (most or {}).get(name)
        is_good = _pick(device, True, bound is None or over <= bound + noise)
        numbers = {"ms": seconds * 1e3, "ratio": over, "band": noise, "peak_gib": peaks[name]}
        note = "" if bound is None else f"at most {bound} + band"
        yield _row(what, name, is_good, note, tokens_per_second=tokens / seconds, **numbers)


def _module(device: str) -> Any:
    return torch.get_device_module(device)


def _pick(device: str, test: Any, real: Any) -> Any:
    """Choose sizes: those of a test where the device does not say how much memory it has."""
    return real if hasattr(_module(device), "mem_get_info") else test
