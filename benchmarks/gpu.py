"""Everything that only an accelerator can answer: ``python benchmarks/gpu.py``.

One table with a verdict in each row, and the numbers once more as JSON: whether a step computes
there what it computes on the CPU, whether the host ever waits, what attention, losses and
compilation cost, whether memory is what was predicted, and how much of the device a model of 1 B
and one of 7 B parameters use. Sizes are computed from the memory that there is, before anything is
allocated; one device of 24 GB suffices. A turn is several steps and then one wait for the device,
so that the host may run ahead as it does in training.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from bare import Size, bare_step, head_loss, our_step
from dry_run import SEVEN_BILLION, dry_run
from losses import FULL, WAYS, LossSize, train
from pairs import Times, band, ratio, take_turns
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict

import forgekit as fk
from forgekit.model.attention import Documents, attend_causal
from forgekit.model.attention_kernels import ORDER, choose, why_not
from forgekit.parallel.activation_checkpoint import recompute

BARE, AGAIN, STEP = "bare loop", "bare loop again", "make_step"
VARIANTS: list[tuple[fk.Precision, bool]] = [("fp32", False), ("bf16", False), ("bf16", True)]
GIB = 2**30
USABLE = 0.85
"""Of the device's memory; the rest is for its libraries and what an allocator leaves between."""
ONE_BILLION = fk.TransformerSpec(
    vocab_size=32000, dim=2048, layers=22, heads=32, kv_heads=4, ffn_dim=5632, max_seq_len=4096
)

TINY = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=8
)

Row = dict[str, Any]


@attrs.frozen
class Bench:
    """Where to measure, and sizes that fit there.

    Attributes:
        device: Name of the device.
        memory: Its bytes.
        is_tiny: Whether sizes are those of a test, which runs through everything and proves
            nothing about speed.
    """

    device: str
    memory: int
    is_tiny: bool = False

    @property
    def rounds(self) -> int:
        """Rounds of taking turns."""
        return 1 if self.is_tiny else 12

    def times(self, entries: dict[str, Callable[[], None]]) -> Times:
        """Seconds of each entry and round; a test needs no warm-up."""
        return take_turns(entries, self.rounds, warmup=0 if self.is_tiny else 2)

    @property
    def size(self) -> Size:
        """The model on which a step is compared with the bare loop; 16 layers take 20 GB."""
        if self.is_tiny:
            return Size(dim=16, layers=1, seq_len=8, vocab_size=32, rows=2, micro_batches=2)
        rows = 8 if self.memory > 40 * GIB else 4
        return Size(1024, 16, seq_len=1024, vocab_size=32768, heads=16, rows=rows, micro_batches=2)

    @property
    def loss(self) -> LossSize:
        """The loss whose logits alone take 6 GB three times over, or a quarter of that."""
        if self.is_tiny:
            return LossSize(16, 8, 32, device=self.device)
        tokens = 8192 if self.memory > 40 * GIB else 4096
        return LossSize(tokens, 2048, 131072, device=self.device, dtype=torch.bfloat16)

    def fitted(self, spec: fk.TransformerSpec, bytes_each: int) -> fk.TransformerSpec:
        """Leave out layers until a step fits: all parts of a layer stay as wide as they are.

        Args:
            spec: The model.
            bytes_each: Bytes of a parameter with its gradient, moments and copies.
        """
        if self.is_tiny:
            return TINY
        layers = spec.layers
        while layers > 1 and self._needs(spec, layers, bytes_each) > USABLE * self.memory:
            layers -= 1
        return attrs.evolve(spec, layers=layers)

    def _needs(self, spec: fk.TransformerSpec, layers: int, bytes_each: int) -> int:
        """A step with full recomputation of one row: fixed parts, inputs and one block."""
        parameters = 2 * spec.vocab_size * spec.dim + layers * _block_parameters(spec)
        width = layers * spec.dim + 16 * spec.dim + 6 * spec.ffn_dim
        return bytes_each * parameters + 4 * spec.max_seq_len * width + 2 * GIB


def main(argv: list[str] | None = None) -> int:
    """Measure everything and return 1 if any verdict is FAIL."""
    bench = _parse(argv)
    rows = measure(bench)
    fk.shutdown()
    facts = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    show(rows, facts | {"device": _name(bench.device), "memory": f"{bench.memory / GIB:.0f} GiB"})
    return int(any(row["verdict"] == "FAIL" for row in rows))


def measure(bench: Bench) -> list[Row]:
    """Run all parts; one that raises is a row with its error, and the others go on."""
    torch.set_float32_matmul_precision("high")
    rows: list[Row] = []
    for part in (same_as_cpu, waits, attention, losses, steps, on_policy, memory, speed):
        sys.stderr.write(f"{part.__name__} ...\n")
        try:
            rows.extend(part(bench))
        except Exception as error:
            shown = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"what": part.__name__, "entry": "", "note": shown, "verdict": "FAIL"})
        _forget(bench.device)
    return rows


def _parse(argv: list[str] | None) -> Bench:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--memory", type=float, help="GiB to use; default: all that the device has")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    options = parser.parse_args(argv)
    device = options.device
    if device is None:
        found = torch.accelerator.current_accelerator()
        if found is None:
            parser.error("torch finds no accelerator. `make bench` measures on the CPU.")
        device = found.type
    memory = options.memory and int(options.memory * GIB)
    return Bench(device, memory or _memory_of(device), options.tiny)


# ---- what is measured


def same_as_cpu(bench: Bench) -> Iterator[Row]:
    """Take the same steps there and on the CPU: with logits, with head, packed, under autocast."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from device.test_one_process import STEPS, differences, loader, new_state, packed

    for name, (loss_fn, dtype, is_packed, bound) in STEPS.items():
        batches = [packed(batch) if is_packed else batch for batch in loader()][:6]
        states = []
        for device in ("cpu", bench.device):
            state = new_state(device, dtype)
            step = fk.make_step(loss_fn, schedule=fk.constant(1e-2), max_norm=0.5)
            for group in (batches[:3], batches[3:]):
                state, _ = step(state, group)
            states.append(state)
        error = float(differences(states[1], states[0]))
        most = max(bound, 1e-11)
        yield _verdict("two steps as on the CPU", name, error <= most, f"{error:.1e} ≤ {most:.0e}")


def waits(bench: Bench) -> Iterator[Row]:
    """Take a step where whatever makes the host wait is an error."""
    what = "no wait of the host"
    module = torch.get_device_module(bench.device)
    if not hasattr(module, "set_sync_debug_mode"):  # CUDA alone has it
        yield {"what": what, "entry": "set_sync_debug_mode", "verdict": "not on this device"}
        return
    size = attrs.evolve(bench.size, layers=1)
    batches = [batch.pin_memory() for batch in size.batches()]
    for name, loss in (("logits", our_step), ("head", _head_step)):
        step = loss(size.model(bench.device), batches)
        step()
        module.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            yield _verdict(what, name, False, str(error).splitlines()[0])
        else:
            yield _verdict(what, name, True, "")
        finally:
            module.set_sync_debug_mode("default")


def losses(bench: Bench) -> Iterator[Row]:
    """Compare ways from hidden states to a loss, in time and in the memory of the device."""
    size, again = bench.loss, f"{FULL} again"
    entries = {name: _turn(train(name, size), size.device) for name in WAYS}
    peaks = {name: _peak(entry, bench.device) for name, entry in entries.items()}
    entries[again] = _turn(train(FULL, size), size.device)
    kind = f"loss, {size.tokens} x {size.dim} -> {size.vocab_size}"
    yield from _compared(
        kind, entries, (FULL, again), size.tokens, bench, peaks, most={"forgekit": 1.05}
    )


def steps(bench: Bench) -> Iterator[Row]:
    """Compare ``make_step`` with the bare loop, compiled and not, on models prepared alike."""
    mesh = fk.build_mesh(device=bench.device)
    batches = bench.size.batches(bench.device)
    times = 1 if bench.is_tiny else 3
    for precision, compiled in VARIANTS:
        kind = f"step, {precision}{', compiled' if compiled else ''}"
        if compiled and not _compiles(bench.device):
            yield {"what": kind, "entry": STEP, "verdict": "not on this device"}
            continue

        def prepared(precision: fk.Precision = precision, compiled: bool = compiled) -> Any:
            model = bench.size.model()
            return fk.parallelize(model, mesh, precision=precision, compile=compiled)

        builders = {BARE: bare_step, AGAIN: bare_step, STEP: our_step}
        entries = {
            n: _turn(build(prepared(), batches), bench.device, times)
            for n, build in builders.items()
        }
        tokens = bench.size.tokens * times
        yield from _compared(kind, entries, (BARE, AGAIN), tokens, bench, {}, most={STEP: 1.02})
        del entries
        _forget(bench.device)


def on_policy(bench: Bench) -> Iterator[Row]:
    """Find log-probabilities of sampling again in training, bit for bit, and what that costs."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from evaluation.test_on_policy import ADAPTERS, DTYPES, build, differing, prompts_of

    count, new = (3, 2) if bench.is_tiny else (20, 100)
    for dtype in DTYPES:
        for name, lora in ADAPTERS.items():
            prompts = [prompt.to(bench.device) for prompt in prompts_of(count)]
            model = build(dtype, lora).to(bench.device)
            total, differ = differing(model, prompts, max_new_tokens=new)
            what, note = "log-probabilities as in training", f"{differ} of {total} differ"
            yield _verdict(what, f"{dtype}, {name}", not any(differ), note)
    mesh = fk.build_mesh(device=bench.device)
    batches = bench.size.batches(bench.device)
    options = {"ordinary": False, "ordinary again": False, "batch_invariant": True}
    entries = {}
    for name, is_on in options.items():
        model = fk.parallelize(bench.size.model(), mesh, precision="bf16", batch_invariant=is_on)
        entries[name] = _turn(bare_step(model, batches), bench.device)
    first, again, last = entries
    most = {last: 3.0}
    yield from _compared("step, bf16", entries, (first, again), bench.size.tokens, bench, {}, most)


def memory(bench: Bench) -> Iterator[Row]:
    """Compare the peak of a step with what fake tensors predict, with full recomputation."""
    spec = bench.fitted(SEVEN_BILLION, bytes_each=16)
    found = dry_run(spec, 1, bench.device)
    what, entry = "memory of a step, fp32, recomputed", f"{spec.layers} layers at dim {spec.dim}"
    step = _plain_step(spec, bench)
    step()
    peak = _peak(step, bench.device, growth=False)
    if peak is None:
        yield {"what": what, "entry": entry, "verdict": "not on this device"}
        return
    share = peak * GIB / found.peak
    is_close = abs(share - 1) <= 0.05
    note = f"{share:.3f} of {found.peak / GIB:.2f} GiB predicted"
    yield _verdict(what, entry, is_close, note) | {"peak_gib": peak}


def speed(bench: Bench) -> Iterator[Row]:
    """Share of the device that training uses, against a large product in bfloat16.

    FLOPs of a step: ``6 * N`` per token, ``N`` the parameters of all products, and for attention
    ``12 * h * c`` per layer and key that a position sees, causally and in its own document.
    """
    best = _product_rate(bench)
    yield {"what": "product in bf16", "entry": f"{best / 1e12:.1f} TFLOP/s", "verdict": "-"}
    for name, whole in (("1 B", ONE_BILLION), ("7 B", SEVEN_BILLION)):
        spec = bench.fitted(whole, bytes_each=20)
        step = _recomputed_step(spec, bench)
        times = bench.times({name: _turn(step, bench.device)})
        tokens = spec.max_seq_len
        seconds = _median(times, name)
        share = flops(spec, [spec.max_seq_len]) / seconds / best
        entry = f"{name}: {spec.layers} of {whole.layers} layers"
        yield {
            "what": "MFU, bf16, recomputed",
            "entry": entry,
            "ms": seconds * 1e3,
            "tokens_per_second": tokens / seconds,
            "note": f"MFU {share:.1%}",
            "verdict": "-",
        }
        del step
        _forget(bench.device)


def flops(spec: fk.TransformerSpec, documents: list[int]) -> float:
    """FLOPs of forward and backward over rows of such documents; what is recomputed is not counted.

    Args:
        spec: The model.
        documents: Positions of each document.
    """
    products = spec.vocab_size * spec.dim + spec.layers * (_block_parameters(spec) - 2 * spec.dim)
    seen = sum(length * (length + 1) / 2 for length in documents)
    return 6.0 * products * sum(documents) + 12.0 * spec.layers * spec.dim * seen


def attention(bench: Bench) -> Iterator[Row]:
    """Compare what attends inside packed documents: each kernel that the device runs, forced."""
    rows, positions, channels = (1, 16, 8) if bench.is_tiny else (4, 4096, 128)
    host = (torch.arange(positions) * 5 // positions).expand(rows, -1).contiguous()
    ids, documents = host.to(bench.device), Documents()
    documents.note(ids, host)  # as a step does, so that nothing is read back
    what = f"attention, {rows} x {positions}, 5 documents each, bf16"
    here = ids.device, torch.bfloat16, channels
    entries: dict[str, Callable[[], None]] = {}
    for kernel in ORDER["documents"]:
        if why := why_not(kernel, *here):
            yield {"what": what, "entry": kernel, "note": why, "verdict": "not on this device"}
        else:
            run = _attending(kernel, rows, positions, channels, ids, documents)
            entries[kernel] = _turn(run, bench.device)
    peaks = {name: _peak(entry, bench.device) for name, entry in entries.items()}
    again = _attending("sdpa", rows, positions, channels, ids, documents)
    entries["sdpa again"] = _turn(again, bench.device)
    found = list(
        _compared(what, entries, ("sdpa", "sdpa again"), rows * positions, bench, peaks, {})
    )
    chosen, best = choose("documents", *here), min(row["ratio"] for row in found)
    for row in found:
        if row["entry"] == chosen:
            is_best = bench.is_tiny or row["ratio"] <= best * 1.1 + row["band"]
            row |= {"note": "what auto takes", "verdict": "ok" if is_best else "FAIL"}
        yield row


def _attending(
    kernel: Any, rows: int, positions: int, channels: int, ids: torch.Tensor, documents: Documents
) -> Callable[[], None]:
    """Forward and backward of 16 heads over 4 of keys."""
    shapes = [(rows, positions, heads, channels) for heads in (16, 4, 4)]
    inputs = [
        torch.randn(shape).to(ids.device, torch.bfloat16).requires_grad_() for shape in shapes
    ]

    def run() -> None:
        out = attend_causal(*inputs, doc_ids=ids, attention=kernel, documents=documents)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


# ---- how it is shown


COLUMNS = {
    "ms": ("ms", ".2f"),
    "ratio": ("ratio", ".3f"),
    "A/A band": ("band", ".3f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "GiB": ("peak_gib", ".2f"),
}
"""Numbers of a row: how the column is called, the key and how it is written."""


def show(rows: list[Row], facts: dict[str, str]) -> None:
    """Print a table for the reader and a line of JSON for the next one."""
    table = Table(title=", ".join(facts.values()))
    for column in ("what", "entry", *COLUMNS, "note", "verdict"):
        table.add_column(column, justify="right" if column in COLUMNS else "left")
    for row in rows:
        numbers = [_shown(row.get(key), form) for key, form in COLUMNS.values()]
        table.add_row(row["what"], row["entry"], *numbers, row.get("note", ""), row["verdict"])
    Console(width=160).print(table)
    sys.stdout.write(json.dumps(facts | {"rows": rows}) + "\n")


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _verdict(what: str, entry: str, is_good: bool, note: str) -> Row:
    return {"what": what, "entry": entry, "note": note, "verdict": "ok" if is_good else "FAIL"}


def _compared(
    what: str,
    entries: dict[str, Callable[[], None]],
    baseline: tuple[str, str],
    tokens: int,
    bench: Bench,
    peaks: dict[str, float | None],
    most: dict[str, float],
) -> Iterator[Row]:
    """Take turns; a ratio has a verdict where there is a target, with the band added to it."""
    first, again = baseline
    times = bench.times(entries)
    noise = band(times, again, first)
    for name in entries:
        here = ratio(times, name, first)
        bound = most.get(name)
        is_good = bench.is_tiny or bound is None or here <= bound + noise
        yield _verdict(what, name, is_good, "" if bound is None else f"≤ {bound} + band") | {
            "ms": _median(times, name) * 1e3,
            "ratio": here,
            "band": noise,
            "tokens_per_second": tokens / _median(times, name),
            "peak_gib": peaks.get(name),
        }


# ---- the device


def _turn(run: Callable[[], Any], device: str, times: int = 1) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(times):
            run()
        if device != "cpu":
            torch.get_device_module(device).synchronize()

    return turn


def _peak(run: Callable[[], Any], device: str, *, growth: bool = True) -> float | None:
    """GiB at the highest during a call, gradients that it leaves included; None if not counted."""
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    gc.collect()
    before = module.memory_allocated() if growth else 0
    module.reset_peak_memory_stats()
    run()
    return (module.max_memory_allocated() - before) / GIB


def _memory_of(device: str) -> int:
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return module.mem_get_info()[1]
    raise SystemExit(f"{device} does not say how much memory it has; pass --memory GIB.")


def _name(device: str) -> str:
    module = torch.get_device_module(device)
    return module.get_device_name() if hasattr(module, "get_device_name") else device


def _forget(device: str) -> None:
    gc.collect()
    getattr(torch.get_device_module(device), "empty_cache", lambda: None)()


def _compiles(device: str) -> bool:
    from torch._dynamo.device_interface import get_interface_for_device

    try:
        return bool(get_interface_for_device(device))
    except NotImplementedError:
        return False


def _head_step(model: torch.nn.Module, batches: list[TensorDict]) -> Callable[[], Any]:
    return our_step(model, batches, head_loss)


def _recomputed_step(spec: fk.TransformerSpec, bench: Bench) -> Callable[[], Any]:
    """One row in bfloat16 through the model as a recipe lays it out."""
    mesh = fk.build_mesh(device=bench.device)
    with torch.device("meta"):
        model = fk.Transformer(spec)
    model = fk.parallelize(model, mesh, precision="bf16", activation_checkpoint="full")
    return our_step(model, [_row_of(spec, bench)], head_loss, mesh)


def _plain_step(spec: fk.TransformerSpec, bench: Bench) -> Callable[[], Any]:
    """Two micro-batches of a row through the plain model in float32, as in the dry run."""
    with torch.device("meta"):
        model = fk.Transformer(spec)
    model = model.to_empty(device=bench.device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for layer in model.layers:
        recompute(layer, "full")
    return our_step(model, [_row_of(spec, bench)] * 2, head_loss)


def _row_of(spec: fk.TransformerSpec, bench: Bench) -> TensorDict:
    ids = torch.randint(spec.vocab_size, (1, spec.max_seq_len + 1)).to(bench.device)
    return TensorDict(input_ids=ids[:, :-1], labels=ids[:, 1:].clone(), batch_size=[1])


def _block_parameters(spec: fk.TransformerSpec) -> int:
    head = spec.dim // spec.heads
    attention = 2 * spec.dim * spec.dim + 2 * spec.dim * spec.kv_heads * head
    return attention + 3 * spec.dim * spec.ffn_dim + 2 * spec.dim


def _product_rate(bench: Bench) -> float:
    """FLOP/s of one large product, the best of several."""
    n = 32 if bench.is_tiny else 8192
    a, b = (torch.randn(n, n).to(bench.device, torch.bfloat16) for _ in range(2))
    times = bench.times({"product": _turn(lambda: a @ b, bench.device)})
    return 2 * n**3 / min(times["product"])


def _median(times: Times, name: str) -> float:
    return statistics.median(times[name])


if __name__ == "__main__":
    sys.exit(main())
