"""What one looks at between the parts of a step: norms by layer, gradient noise, values inside.

A hook is a function, and it is called where a recipe calls it. Those of gradients stand between
``reduce_totals`` and ``update``: ``make_step(..., gradient_hook=...)`` calls one there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from forgekit.inputs import check_integers, quoted
from forgekit.mesh import rank_name
from forgekit.parallel.fsdp import clear_gradients, fsdp_modules, release
from forgekit.parallel.layout import shard_and_owners, size_of, world_of
from forgekit.state import TrainState
from forgekit.steps.accumulate import accumulate
from forgekit.steps.forward import LossFn
from forgekit.steps.gradients import grad_norms
from forgekit.steps.make_step import GradientHook
from forgekit.steps.totals import Totals, reduce_totals, with_gradient_square

WIDE = torch.float32
"""The narrowest dtype in which gradients are added and magnitudes read."""
SMALLEST, LARGEST = -40, 20
"""Powers of two between which a histogram has a bin for each."""


def every_steps(steps: int, hook: GradientHook) -> GradientHook:
    """Call a gradient hook in every ``steps``-th step only, so that it costs nothing in others.

    Args:
        steps: Steps from one call to the next; the step that takes a state to ``state.step ==
            steps`` is the first. Choose a multiple of ``log_every``, or no row will have it.
        hook: What to call; every rank calls it in the same steps.

    Raises:
        ValueError: If ``steps`` is less than 1.
    """
    check_integers(steps=(steps, 1))
    return lambda state, totals: {} if (state.step + 1) % steps else hook(state, totals)


def layer_norms(state: TrainState, totals: Totals) -> dict[str, Tensor]:
    """Give the norm of the token-mean gradient of each layer, as a gradient hook.

    A layer is what stands before the first number in a parameter's name, with it
    (``layers.3.attention.query.weight`` is in ``layers.3``), else the module of the parameter.

    Args:
        state: The state whose gradients ``accumulate`` left; nothing in it changes.
        totals: Reduced totals.

    Returns:
        ``grad_norm/<layer>``: ``[]`` float64, before clipping, the same on every rank.
    """
    squares: dict[str, Tensor] = {}
    for name, norm in grad_norms(state, totals).items():
        layer = f"grad_norm/{_layer(name)}"
        squares[layer] = squares.get(layer, 0.0) + norm.square()
    return {layer: square.sqrt() for layer, square in squares.items()}


def _layer(name: str) -> str:
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), max(len(parts) - 2, 0))
    return ".".join(parts[: first + 1])


def gradient_noise(
    state: TrainState, batches: Iterable[TensorDictBase], loss_fn: LossFn
) -> dict[str, Tensor]:
    r"""Estimate how noisy the gradient is, from the norms of micro-batches' own gradients.

    A micro-batch of :math:`n` targets has a mean gradient whose expected squared norm is
    :math:`|G|^2 + S / n`, where :math:`G` is the true gradient and :math:`S` the trace of its
    covariance per target. The mean over micro-batches and the gradient of all of them give two
    equations for the two. :math:`S / |G|^2` is the simple noise scale: the batch size, in targets,
    below which doubling it nearly halves the steps that are needed. Source: McCandlish et al., "An
    Empirical Model of Large-Batch Training", 2018, appendix A.

    It costs the gradients of these micro-batches once more, and the memory of one gradient. No
    gradient is left behind, nothing in ``state`` changes. Dropout is the same in each of them.

    Args:
        state: The state; every rank calls it. Parameters that its optimizer does not hold are left
            out.
        batches: At least two micro-batches, as for ``accumulate``; those of the next step will do.
            A pipeline has to be able to run each alone.
        loss_fn: ``loss_fn(model, batch) -> Loss``.

    Returns:
        ``[]`` float64, the same on every rank: ``noise/trace`` and ``noise/gradient_sq``, each
        without bias, and ``noise/scale``, their quotient. A single estimate is noisy, and
        ``noise/gradient_sq`` may be negative: average each of the two over time, then divide. NaN
        if fewer than two micro-batches have targets.

    Raises:
        ValueError: If there are fewer than two micro-batches.
    """
    pulled = list(batches)
    if len(pulled) < 2:
        raise ValueError(
            f"gradient_noise got {len(pulled)} of at least 2 micro-batches, whose gradients it "
            "compares. Lower batch_size, so that a step has more of them."
        )
    sharded = fsdp_modules(*state.layout.roots(state.model))
    sums: dict[Tensor, Tensor] = {}
    parts = []
    try:
        for batch in pulled:
            totals = accumulate(state, [batch], loss_fn, audit=False)
            parts.append(reduce_totals(totals, state, audit=False))
            release(sharded)
            for p in state.model.parameters():
                if p.grad is not None:
                    wide = p.grad.detach().to(torch.promote_types(p.dtype, WIDE))
                    sums[p] = sums[p].add_(wide) if p in sums else wide.clone()
        for p, total in sums.items():
            p.grad = total.to(p.dtype)
        return _noise(state, parts)
    finally:
        clear_gradients(state.model, sharded)


def _noise(state: TrainState, parts: Sequence[Totals]) -> dict[str, Tensor]:
    """Solve for the two unknowns; the parameters hold the sum of the parts' gradients."""
    targets = torch.stack([part["targets"] for part in parts])
    scale = parts[-1]["loss_scale"].double()
    squares = torch.stack([part["grad_sq"] for part in parts]) / scale.square()
    whole = with_gradient_square(parts[-1], state)["grad_sq"]
    if world_of(state.mesh) > 1:
        dist.all_reduce(whole)
    large = whole / (scale * targets.sum()).square()
    has = targets > 0
    count = has.sum()
    small = torch.where(has, squares / targets.square(), 0.0).sum() / count
    per_part = torch.where(has, targets.reciprocal(), 0.0).sum() / count
    trace = (small - large) / (per_part - targets.sum().reciprocal())
    true = large - trace / targets.sum()
    return {"noise/trace": trace, "noise/gradient_sq": true, "noise/scale": trace / true}


def histograms(
    state: TrainState, totals: Totals | None = None, *, pattern: str = "*"
) -> dict[str, list[int]]:
    """Count the magnitudes of weights, or of gradients, by powers of two, over all ranks.

    Magnitudes tell what a dtype would lose: bfloat16 and float32 end near 2**-126, float16 at
    2**-24. Every rank calls it: one collective and one copy to the host, so ask now and then, and
    log it with ``log.event(state, histograms(state), show=False)``.

    Args:
        state: The state; nothing in it changes.
        totals: Reduced totals, for the gradients of the token-mean loss, before clipping: call it
            between ``reduce_totals`` and ``update``. None counts the weights.
        pattern: Names of parameters, as ``"layers.0.*"``.

    Returns:
        ``histogram/weight/<name>``, or ``histogram/gradient/<name>``: counts of values that are 0;
        for each exponent e from -40 to 20 of those with ``2**(e-1) <= |value| < 2**e``, smaller
        and larger ones in the first and last of these; and of those that are not finite.
    """
    release(fsdp_modules(*state.layout.roots(state.model)))
    names = [name for name in _all_names(state) if fnmatchcase(name, pattern)]
    shape, device = (len(names), LARGEST - SMALLEST + 3), state.targets.device
    counts = torch.zeros(shape, dtype=torch.float64, device=device)
    rows, world = {name: row for row, name in enumerate(names)}, world_of(state.mesh)
    for name, parameter in state.model.named_parameters():
        value = parameter if totals is None else parameter.grad
        if name in rows and value is not None:
            shard, owners = shard_and_owners(value.detach(), world // size_of(state.mesh, "pp"))
            wide = shard.to(torch.promote_types(shard.dtype, WIDE))
            if totals is not None:
                wide = wide / (totals["loss_scale"] * totals["targets"].clamp(min=1)).to(wide)
            counts[rows[name]] = _magnitudes(wide) / owners
    if world > 1:
        dist.all_reduce(counts)
    kind = "weight" if totals is None else "gradient"
    found = counts.round().long().tolist()
    return {f"histogram/{kind}/{name}": row for name, row in zip(names, found, strict=True)}


def _magnitudes(values: Tensor) -> Tensor:
    """Counts of zeros, of each exponent, and of what is not finite."""
    _, exponents = torch.frexp(values)
    index = exponents.long().clamp(SMALLEST, LARGEST) - SMALLEST + 1
    index = torch.where(values == 0, torch.zeros_like(index), index)
    bins = LARGEST - SMALLEST + 3
    index = torch.where(values.isfinite(), index, torch.full_like(index, bins - 1))
    # For the length of torch.bincount's result the host would wait.
    one = torch.ones((), dtype=torch.float64, device=values.device).expand(index.numel())
    return one.new_zeros(bins).scatter_add_(0, index.flatten(), one)


def _all_names(state: TrainState) -> list[str]:
    """Names of all parameters but packed ones, of all stages; the same list on every rank."""
    own = [name for name, p in state.model.named_parameters() if p.is_floating_point()]
    if size_of(state.mesh, "pp") == 1:
        return own
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return list(dict.fromkeys(name for names in gathered for name in names))


@contextmanager
def capture_activations(
    state: TrainState, patterns: Sequence[str], folder: str | os.PathLike[str]
) -> Iterator[None]:
    """Write what modules return into a safetensors file, one for each rank.

    The file is ``folder/step_00000100/rank0.safetensors``, with the rank's position in the mesh in
    its name. Tensors are named ``<module>/<call>``, with ``/<index>`` behind it where a module
    returns several, in tuples, lists, dicts or dataclasses; each is this rank's part, in the order
    of the calls (micro-batches). What backward computes again is not captured again. A pipeline
    runs its modules once more before the first step and evaluation of a kind, which counts as a
    call.

    Args:
        state: The state; its step names the folder.
        patterns: Names of modules, as ``"layers.*.attention"``; ``*`` matches dots too.
        folder: Such as ``out / "activations"``.

    Raises:
        ValueError: If a pattern matches no module (a stage of a pipeline may have none), or a
            module that matches returned no tensor: it did not run, or it is compiled.

    Examples:
        Around a step, every hundred steps::

            look = fk.every(100, state)
            with capture_activations(state, ["layers.*"], out) if look else nullcontext():
                state, metrics = step(state, batches)
    """
    modules = _matching(state, patterns)
    found: dict[str, Tensor] = {}
    calls = dict.fromkeys(modules, 0)

    def note(name: str, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # backward computes it again
            return
        tensors = _tensors(output)
        for index, tensor in enumerate(tensors):
            local = tensor.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            end = f"/{index}" if len(tensors) > 1 else ""
            found[f"{name}/{calls[name]}{end}"] = local.to("cpu", copy=True).contiguous()
        calls[name] += bool(tensors)

    hooks = [
        module.register_forward_hook(lambda _m, _args, output, name=name: note(name, output))
        for name, module in modules.items()
    ]
    step, where = f"step_{state.step:08d}", rank_name(state.mesh)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if silent := [name for name, count in calls.items() if not count]:
        raise ValueError(
            f"modules returned no tensor: {quoted(silent[:4])}{', ...' * (len(silent) > 4)}. They "
            "did not run, return none, or are compiled. Leave them out, or set compile=False."
        )
    from safetensors.torch import save_file

    path = Path(folder) / step / f"{where}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, path)


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of what a module returned; to torch's pytrees a dataclass is a leaf."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            found += _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def _matching(state: TrainState, patterns: Sequence[str]) -> dict[str, nn.Module]:
    here = (
        (name, module)
        for name, module in state.model.named_modules()
        if name and not getattr(module, "is_absent", False)  # of another pipeline stage
    )
    modules = dict(here)
    found = {p: [name for name in modules if fnmatchcase(name, p)] for p in patterns}
    missing = [pattern for pattern, names in found.items() if not names]
    if missing and size_of(state.mesh, "pp") == 1:
        raise ValueError(
            f"the patterns {missing} match no module; the first modules are {list(modules)[:4]}. "
            "A pattern is a name with * and ?, as 'layers.*.attention'."
        )
    chosen = {name for names in found.values() for name in names}
    return {name: module for name, module in modules.items() if name in chosen}
