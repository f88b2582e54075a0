"""What a step costs beside the loop written by hand, counted: the same on every machine.

Most of it holds for devices that are not here: a kernel is a kernel, and a byte a byte. Only the
time of the host is a time, taken where kernels have next to nothing to do.
"""

from __future__ import annotations

import attrs
import pytest
import torch
import torch._dynamo
from bare import Size, bare_loss, bare_step, head_loss, loss_fn, our_head_step, our_step
from device.pretend import NAME, watching
from dry_run import SEVEN_BILLION, dry_run
from pairs import band, ratio, take_turns
from pool import run_ranks
from structure import Counted, saving
from torch._dynamo.utils import counters

import forgekit as fk
from forgekit.parallel.activation_checkpoint import compile_blocks

BARE, AGAIN, STEP, HEAD = "bare loop", "bare loop again", "make_step", "make_step, head"
STEPS = {BARE: bare_step, STEP: our_step, HEAD: our_head_step}
LOSSES = {BARE: bare_loss, STEP: loss_fn, HEAD: head_loss}
MOST_KERNELS = 22
MOST_BREAKS, MOST_RECOMPILATIONS = 0, 1
MOST_HOST_TIME = {STEP: 1.2, HEAD: 1.35}
SMALL = Size(dim=64, layers=1, seq_len=32, vocab_size=512)
LARGE = Size(dim=256, layers=4, seq_len=256, vocab_size=4096)
TINY = Size(dim=16, layers=1, seq_len=4, vocab_size=32, rows=1)


def count(name: str, size: Size) -> Counted:
    step = STEPS[name](size.model(), size.batches())
    step()  # the optimizer makes its moments
    with Counted() as counted:
        step()
    return counted


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["dim 64", "dim 256"])
def test_kernels(row, size, micro_batches):
    size = attrs.evolve(size, micro_batches=micro_batches)
    found = {name: count(name, size) for name in STEPS}
    kernels = {name: counted.kernels.total() for name, counted in found.items()}
    kind = f"dim {size.dim}, {micro_batches} micro-batches"
    row(f"kernels, {kind}", kernels[BARE], kernels[STEP], f"≤ {MOST_KERNELS} more")
    row(f"kernels with head, {kind}", kernels[BARE], kernels[HEAD])
    assert kernels[STEP] - kernels[BARE] <= MOST_KERNELS
    assert not found[STEP].reads
    assert not found[HEAD].reads


@pytest.mark.parametrize("name", [STEP, HEAD])
def test_bytes(row, name):
    size = attrs.evolve(LARGE, micro_batches=1)
    saved = {way: saved_bytes(way, size) for way in (BARE, name)}
    made = {way: count(way, size).allocated for way in (BARE, name)}
    kind = f"per token, dim 256, {name}"
    row(f"bytes saved {kind}", *(saved[way] // size.tokens for way in (BARE, name)), "≤ bare loop")
    row(f"bytes allocated {kind}", *(made[way] // size.tokens for way in (BARE, name)))
    assert saved[name] <= saved[BARE]


def saved_bytes(name: str, size: Size) -> int:
    """Of one micro-batch, once its forward is done."""
    model, (batch, *_) = size.model(), size.batches()
    with saving(model) as saved:
        loss = LOSSES[name](model, batch)
    del loss
    return saved.bytes


def test_memory_of_seven_billion_parameters(row):
    """On fake tensors; without what is there in any step, and with it."""
    found = dry_run(SEVEN_BILLION, rows=1)
    row(
        "7 B: MiB beside parameters, gradients, moments",
        _mib(found.expected - found.fixed),
        _mib(found.peak - found.fixed),
        "",
    )
    row("7 B: MiB in all", _mib(found.expected), _mib(found.peak), "within 5%")
    assert abs(found.peak / found.expected - 1) <= 0.05
    assert found.fixed == pytest.approx(16 * _parameters(SEVEN_BILLION), rel=1e-3)


def _mib(size: int) -> int:
    return size // 2**20


def _parameters(spec: fk.TransformerSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in fk.Transformer(spec).parameters())


def copies(_rank: int, _world: int) -> tuple[int, dict[str, int]]:
    """Train on pinned micro-batches of the host; what the pretend device saw of a step."""
    batches = [batch.apply(torch.Tensor.pin_memory) for batch in SMALL.batches()]
    step = our_step(SMALL.model().to(NAME), batches)
    step()
    with watching() as ledger:
        step()
    return len(ledger.waits), dict(ledger.copied)


def test_copies(row):
    """A micro-batch goes to the device, once and without a wait; nothing comes back."""
    ((waits, copied),) = run_ranks(copies, 1, group=False, setup="device.pretend:install")
    whole = sum(x.nbytes for batch in SMALL.batches() for x in batch.values())
    row("host reads of a step", 0, waits, "0")
    row("bytes to the device, dim 64", whole, copied["to"], "the batch, once")
    row("bytes from the device", 0, copied.get("from", 0), "0")
    assert (waits, copied) == (0, {"to": whole, "pageable": 0})


def exchange(_rank: int, _world: int, name: str) -> tuple[dict[str, int], int]:
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(SMALL.model(), mesh)
    options = {} if name == BARE else {"mesh": mesh}
    step = STEPS[name](model, SMALL.batches(), **options)
    step()
    with Counted() as counted:
        step()
    return dict(counted.collectives), counted.moved


def test_collectives(row):
    """FSDP on 2 ranks: beside its own one more, as the bare loop has for its norm alone."""
    (bare, bare_bytes), (ours, our_bytes) = (
        run_ranks(exchange, 2, name)[0] for name in (BARE, STEP)
    )
    row("collectives of a step, FSDP on 2 ranks", sum(bare.values()), sum(ours.values()), "equal")
    row("bytes handed to them", bare_bytes, our_bytes, "≤ bare loop")
    assert sum(ours.values()) == sum(bare.values())
    assert our_bytes <= bare_bytes


LENGTHS = [[64], [32, 32], [10, 54], [7, 20, 37], [16] * 4, [1, 2, 3, 58]]


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_blocks(row):
    """Packed rows whose documents have other lengths each time."""
    torch._dynamo.reset()
    counters.clear()
    model = Size(dim=64, layers=2, seq_len=64, vocab_size=128).model()
    compile_blocks(model.layers, backend="aot_eager")
    for lengths in LENGTHS:
        doc_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
        model(doc_ids, doc_ids=doc_ids).sum().backward()
    breaks = sum(counters["graph_break"].values())
    again = counters["stats"]["unique_graphs"] - breaks - 1
    row("graph breaks of a compiled block", "", breaks, f"≤ {MOST_BREAKS}")
    row("its recompilations, six packings", "", again, f"≤ {MOST_RECOMPILATIONS}")
    assert breaks <= MOST_BREAKS
    assert again <= MOST_RECOMPILATIONS


@pytest.fixture(scope="module")
def host_times():
    builders = STEPS | {AGAIN: bare_step}
    batches = TINY.batches()
    return take_turns({n: build(TINY.model(), batches) for n, build in builders.items()}, 300)


@pytest.mark.parametrize("name", [STEP, HEAD])
def test_host_time(row, host_times, name):
    here, noise = ratio(host_times, name, BARE), band(host_times, AGAIN, BARE)
    most = MOST_HOST_TIME[name]
    row(f"time of the host, {name} (band {noise:.2f})", 1.0, here, f"≤ {most} + band")
    assert here <= most + noise
