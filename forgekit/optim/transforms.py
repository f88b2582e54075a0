"""Pure functions that transform directions; a chain of them turns gradients into the update.

A transform is ``apply(directions, state, at) -> directions, state`` over lists of tensors, one for
each parameter. The first one of a chain gets the gradients; the parameters then move by
``-lr * directions``. There are three kinds, and none depends on the layout:

- *local* ones are elementwise and run on each rank's shards;
- *summed* ones also need sums over a whole parameter, which ``at.total`` adds up over its shards;
- *whole* ones need whole matrices (``matrices.py``) and run on the rank that owns the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from forgekit.checks import check_integers, check_numbers
from forgekit.tensors import local, wide

SMALL = 8
"""Size of the smallest dimension of the tensor on which a chain is checked."""


Tensors = list[Tensor] | tuple[Tensor, ...]
State = Mapping[str, Tensors]


class At(NamedTuple):
    """The inputs of a transform besides directions and state.

    Attributes:
        step: ``[]`` float64: the number of this good step, from 1; the largest of the parameters'.
        lr: ``[]`` float64: its learning rate.
        values: The parameters, in float32 or wider.
        gradients: Their gradients, before the chain.
        total: Sums one number ``[]`` per parameter over the parameter's shards. A shard may be
            empty: pass sums, never means.
        every: ``every(n)`` is true in every n-th step of the run, counting bad ones. It follows
            from ``state.step``, which is on the host and continues after a resume.
        weight_decay: The group's weight decay.
    """

    step: Tensor
    lr: Tensor
    values: Tensors
    gradients: Tensors
    total: Callable[[Sequence[Tensor]], Tensors]
    every: Callable[[int], bool]
    weight_decay: float = 0.0


Apply = Callable[[list[Tensor], dict[str, list[Tensor]], At], tuple[Tensors, State]]


@attrs.frozen(eq=False)
class Transform:
    """One link of a chain; ``transform`` creates one.

    Attributes:
        apply: The function.
        state: By name, the function that creates an entry of a parameter's state.
        whole: Whether it needs whole matrices.
        name: Its name in messages and checkpoints.
        dtype: Of directions on their way to the owner and back; None for float32 or wider.
        kind: ``"adam"`` or ``"decay"``, which the optimizer may run as a fused kernel.
        options: Hyperparameters that the optimizer itself reads.
    """

    apply: Apply
    state: Mapping[str, Callable[[Tensor], Tensor]]
    whole: bool
    name: str
    dtype: torch.dtype | None = None
    kind: str = ""
    options: Mapping[str, Any] = {}


def transform(
    apply: Apply,
    state: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    whole: bool = False,
    **options: Any,
) -> Transform:
    """Make a link of a chain from a pure function; see ``fk.optimizer``.

    Args:
        apply: ``(directions, state, at) -> directions, state``. Directions and each entry of the
            state are lists with a tensor for each parameter, in float32 or wider. It returns new
            ones of the same shapes and changes none in place. It reads nothing on the host: a bad
            step is computed too, and then not written.
        state: By name, a function that creates an entry before the first step from the parameter's
            values, or from zeros of a whole matrix: ``torch.zeros_like``. An entry of a local
            transform has the shape of the values, or is one number.
        whole: Whether directions, state and ``at`` must hold whole matrices ``[o i]``, all of
            one shape, on the rank that owns them; a stack ``[e o i]`` is a matrix for each expert.
        **options: ``name`` and other attributes of ``Transform``.

    Returns:
        The transform.

    Examples:
        >>> import forgekit as fk
        >>> sign = fk.optim.transform(lambda d, state, at: ([x.sign() for x in d], {}))
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = fk.optimizer(model, {"weight": (fk.optim.momentum(0.9), sign)}, lr=0.5)
        >>> before, model.weight.grad = model.weight.detach().clone(), torch.ones(2, 2)
        >>> optimizer.step()
        >>> torch.equal(model.weight, before - 0.5)
        True
    """
    name = options.pop("name", getattr(apply, "__name__", type(apply).__name__))
    return Transform(apply, dict(state or {}), whole, name, **options)


def check_decay_rates(*rates: float) -> None:
    """Raise if a decay rate of a running mean is below 0 or not below 1.

    Raises:
        ValueError: With the rates: the mean would never move, or diverge silently.
    """
    if not all(0 <= rate < 1 for rate in rates):
        raise ValueError(f"decay rates are {rates}; each must be at least 0 and below 1.")


def number(like: Tensor) -> Tensor:
    """Create the state that is one float64 number, 0."""
    return like.new_zeros((), dtype=torch.float64)


def lerp(means: Tensors, values: Tensors, share: Tensor | float) -> Tensors:
    """``means + share * (values - means)``, for all parameters at once."""
    is_tensor = isinstance(share, Tensor)
    weights = [share.to(means[0])] * len(means) if is_tensor else share
    return torch._foreach_lerp([*means], [*values], weights)


def momentum(
    beta: float = 0.95, *, nesterov: bool = True, warmup: int = 0, start: float = 0.85
) -> Transform:
    """``m <- b m + (1 - b) d``; the direction is ``(1 - b) d + b m``, without Nesterov ``m``.

    Args:
        beta: The decay rate ``b``.
        nesterov: Whether the direction is mixed in again after the update of ``m``.
        warmup: Good steps in which ``b`` rises linearly from ``start``.
        start: The first ``b`` of a warm-up.

    References:
        https://proceedings.mlr.press/v28/sutskever13.html
    """
    check_decay_rates(beta, start)
    check_integers(warmup=(warmup, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        b = start + (beta - start) * (at.step / warmup).clamp(max=1) if warmup else beta
        m = lerp(state["momentum_buffer"], d, 1 - b)
        return lerp(d, m, b) if nesterov else m, {"momentum_buffer": m}

    return transform(apply, {"momentum_buffer": torch.zeros_like}, name="momentum")


def adam(beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8) -> Transform:
    """``m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps)``, ``v`` a mean of squares.

    Alone, or followed by ``decay``, it runs as torch's fused AdamW.

    Args:
        beta1: Decay rate of the mean ``m``.
        beta2: Decay rate of the mean square ``v``.
        eps: Added to the root.

    References:
        https://arxiv.org/abs/1412.6980
    """
    check_decay_rates(beta1, beta2)

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        m = lerp(state["exp_avg"], d, 1 - beta1)
        v = lerp(state["exp_avg_sq"], torch._foreach_mul(d, d), 1 - beta2)
        c1, c2 = [[(1 - b**at.step).to(m[0])] * len(m) for b in (beta1, beta2)]
        roots = torch._foreach_sqrt(torch._foreach_div(v, c2))
        torch._foreach_add_(roots, eps)
        return torch._foreach_div(torch._foreach_div(m, c1), roots), {"exp_avg": m, "exp_avg_sq": v}

    state = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}
    options = {"betas": (beta1, beta2), "eps": eps}
    return transform(apply, state, name="adam", kind="adam", options=options)


def lion_sign(beta1: float = 0.9, beta2: float = 0.99) -> Transform:
    """``sign(b1 m + (1 - b1) d)``, then ``m <- b2 m + (1 - b2) d``.

    Args:
        beta1: Share of the mean ``m`` under the sign.
        beta2: Decay rate of the mean.

    References:
        https://arxiv.org/abs/2302.06675
    """
    check_decay_rates(beta1, beta2)

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
        m = state["exp_avg"]
        return torch._foreach_sign(lerp(m, d, 1 - beta1)), {"exp_avg": lerp(m, d, 1 - beta2)}

    return transform(apply, {"exp_avg": torch.zeros_like}, name="lion_sign")


def decay(rate: float = 0.1, *, everything: bool = False) -> Transform:
    """``d + rate w``: decoupled weight decay, per unit of learning rate.

    Args:
        rate: The group's ``weight_decay``.
        everything: Whether embeddings, norms and biases decay too. By default they do not, as with
            ``fk.adamw``, unless the chain's key is their role or a parameter's full name.

    References:
        https://arxiv.org/abs/1711.05101
    """

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        return torch._foreach_add(d, at.values, alpha=at.weight_decay), state

    return _decaying(apply, rate, everything, name="decay", kind="decay")


def cautious_decay(rate: float = 0.1, *, everything: bool = False) -> Transform:
    """``d + rate w`` where ``d w > 0``, else ``d``: only what moves towards zero decays.

    Args:
        rate: The group's ``weight_decay``.
        everything: See ``decay``.

    References:
        https://arxiv.org/abs/2510.12402
    """

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        masks = torch._foreach_mul(d, at.values)
        torch._foreach_sign_(masks)
        torch._foreach_clamp_min_(masks, 0.0)
        return torch._foreach_addcmul(d, at.values, masks, value=at.weight_decay), state

    return _decaying(apply, rate, everything, name="cautious_decay")


def _decaying(apply: Apply, rate: float, everything: bool, name: str, kind: str = "") -> Transform:
    check_numbers(rate=(rate, 0))
    options = {"rate": rate, "everything": everything}
    return transform(apply, name=name, kind=kind, options=options)


def scale(factor: float) -> Transform:
    """``factor d``; as the last link of a chain it is its group's ``lr_scale``.

    Args:
        factor: Multiplies the direction, including decay before it in the chain.
    """
    check_numbers(factor=(factor, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
        return torch._foreach_mul(d, factor), state

    return transform(apply, name="scale", options={"lr_scale": factor})


def stochastic_rounding(seed: int = 0) -> Transform:
    """``d`` as it is; the next values of bfloat16 parameters are rounded up or down at random.

    Rounding is unbiased, with the same bits in every layout; see ``fk.adamw``.

    Args:
        seed: Seed of the rounding.

    References:
        https://arxiv.org/abs/2010.06192
    """
    check_integers(seed=(seed, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
        return d, state

    return transform(apply, name="stochastic_rounding", options={"rounding_seed": seed})


def clip_value(most: float) -> Transform:
    """``min(max(d, -most), most)``, elementwise.

    Args:
        most: The bound.

    References:
        https://arxiv.org/abs/2305.14342
    """
    check_numbers(most=(most, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
        return torch._foreach_clamp_max(torch._foreach_clamp_min(d, -most), most), state

    return transform(apply, name="clip_value")


def clip_norm(most: float) -> Transform:
    """``d min(1, most / |d|)``, with the norm of each whole parameter.

    Args:
        most: The bound of the norm.

    References:
        https://arxiv.org/abs/1211.5063
    """
    check_numbers(most=(most, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        norms = [n.sqrt() for n in at.total([x.square().sum() for x in d])]
        return [x * (most / n).clamp(max=1) for x, n in zip(d, norms, strict=True)], state

    return transform(apply, name="clip_norm")


def trust_ratio() -> Transform:
    """``d |w| / |d|`` with the norms of each whole parameter; ``d`` where one of them is 0 (LAMB).

    References:
        https://arxiv.org/abs/1904.00962
    """

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        pairs = [*zip(at.values, d, strict=True)]
        sums = at.total([torch.stack((w.square().sum(), x.square().sum())) for w, x in pairs])
        ratios = [(of_w / of_d).sqrt() for of_w, of_d in sums]
        # 0 / 0 is NaN, 1 / 0 is infinite, and 0 / 1 would stop a parameter that begins at 0.
        ratios = [torch.where(r.isfinite() & (r > 0), r, 1.0) for r in ratios]
        return [x * r for x, r in zip(d, ratios, strict=True)], state

    return transform(apply, name="trust_ratio")


def cautious_mask() -> Transform:
    """``d k / max(mean(k), 1e-3)`` with ``k = (d g > 0)``: only what agrees with the gradient.

    References:
        https://arxiv.org/abs/2411.16085
    """

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        kept = [(x * g > 0).to(x.dtype) for x, g in zip(d, at.gradients, strict=True)]
        sums = [k.sum() for k in kept]
        sizes = [torch.full_like(n, k.numel()) for n, k in zip(sums, kept, strict=True)]
        sums = at.total([torch.stack(pair) for pair in zip(sums, sizes, strict=True)])
        means = [(some / all_of_it).clamp(min=1e-3) for some, all_of_it in sums]
        return [x * k / mean for x, k, mean in zip(d, kept, means, strict=True)], state

    return transform(apply, name="cautious_mask")


def split_chain(chain: Sequence[Transform]) -> tuple[Sequence[Transform], ...]:
    """Split a chain into the parts that run on shards, on owners, and on shards again."""
    wholes = [number for number, each in enumerate(chain) if each.whole] or [len(chain)]
    return chain[: wholes[0]], chain[wholes[0] : wholes[-1] + 1], chain[wholes[-1] + 1 :]


def run(
    link: Transform, directions: Tensors, state: State, at: At, watched: Any = None
) -> tuple[Tensors, State]:
    """Apply a transform; its inputs must not change, or a bad step could not be discarded.

    Raises:
        ValueError: If one was changed in place.
    """
    inputs = {"directions": directions, **state, "values": at.values, "gradients": at.gradients}
    versions = {name: [t._version for t in tensors] for name, tensors in inputs.items()}
    made, new = link.apply([*directions], {n: [*t] for n, t in state.items()}, watched or at)
    for name, tensors in inputs.items():
        if versions[name] != [t._version for t in tensors]:
            raise ValueError(
                f"{link.name} changes its {name} in place, so a bad step could not be skipped. "
                "Return new tensors."
            )
    return made, new


def check_chain(key: str, chain: Sequence[Transform], like: Tensor) -> set[str]:
    """Run each transform of a chain on a small tensor, and raise if one breaks the rules.

    Args:
        key: The chain's key, for messages.
        chain: The transforms.
        like: A parameter of the chain.

    Returns:
        Names of the fields of ``at`` that are read; ``"whole values"`` and so on, if on owners.

    Raises:
        ValueError: If two transforms name one state, or one returns other shapes or names, or
            changes its inputs in place.
    """
    names = {"step": "the optimizer itself"}
    for each in chain:
        for name in each.state:
            if name in names:
                raise ValueError(
                    f"{names[name]} and {each.name} in the chain of {key!r} both name their state "
                    f"{name!r}; each entry of a checkpoint has one name. Rename one."
                )
            names[name] = each.name
    reads, on_owners = set[str](), split_chain(chain)[1]
    shape = like.shape[-2:] if on_owners else like.shape
    # Small, but different sizes stay different, so that a transposed result is noticed.
    sizes = {size: min(size, SMALL + number) for number, size in enumerate(sorted({*shape}))}
    has_values = not isinstance(local(like), FakeTensor) and not like.is_meta
    options = {"device": like.device if has_values else "cpu", "dtype": wide(like.dtype)}
    with torch.no_grad(), _disable_current_modes():  # modes of a dry run compute no values
        one = torch.ones((), dtype=torch.float64, device=options["device"])
        first = torch.linspace(-1, 2, math.prod(sizes[n] for n in shape), **options)
        first = first.view([sizes[n] for n in shape])
        for is_due in (True, False):
            directions: Tensors = [first]
            at = At(one, one, [first.cos()], [first.sin()], list, lambda _, d=is_due: d)
            for each in chain:
                watched = _Watched(at)
                directions = _try(f"{each.name} in the chain of {key!r}", each, directions, watched)
                is_whole = each in on_owners
                reads |= {f"whole {n}" if is_whole and n != "step" else n for n in watched.read}
    return reads


def _try(text: str, each: Transform, directions: Tensors, watched: _Watched) -> Tensors:
    """Apply a transform once, and compare shapes."""
    shape = directions[0].shape
    state = {n: [make(torch.zeros_like(directions[0]))] for n, make in each.state.items()}
    for name, (entry,) in state.items():
        if not each.whole and entry.ndim and entry.shape != shape:
            raise ValueError(
                f"{text} makes its state {name!r} of shape {tuple(entry.shape)} for values of "
                f"{tuple(shape)}; a local transform's state has the shape of the values or is one "
                "number. Pass whole=True to transform."
            )
    made, new = run(each, directions, state, watched.at, watched)
    before, after = (
        {n: [tuple(t.shape) for t in each_] for n, each_ in s.items()} for s in (state, new)
    )
    if [t.shape for t in made] != [shape] or after != before:
        raise ValueError(
            f"{text} got directions of {tuple(shape)} with the state {before}, and returned "
            f"{[tuple(t.shape) for t in made]} with {after}; shapes and names stay the same."
        )
    return made


class _Watched:
    """An ``At`` that records which fields are read."""

    def __init__(self, at: At) -> None:
        self.at, self.read = at, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.at, name)
