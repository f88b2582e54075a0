"""Directions as pure functions: what a chain of them makes of gradients is the update.

A transform is ``apply(directions, state, at) -> directions, state`` over lists of tensors, one for
each parameter. The first one of a chain gets the gradients; the parameters then move by
``-lr * directions``. There are three kinds, and no author learns of the layout:

- *local* ones are elementwise and run on each rank's shards;
- *summed* ones also need a number of a whole parameter, which ``at.total`` adds up over its shards;
- *whole* ones need whole matrices (``matrices.py``) and run on the rank that owns the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from forgekit.checks import check_integers, check_numbers
from forgekit.optim.groups import check_decay_rates

Tensors = list[Tensor]
State = dict[str, Tensors]


class At(NamedTuple):
    """What a transform may read beside directions and state.

    Attributes:
        step: ``[]`` float64: the number of this good step, from 1.
        lr: ``[]`` float64: its learning rate.
        values: The parameters, in float32 or wider.
        gradients: Their gradients, before the chain.
        total: Adds up numbers ``[]`` of each parameter, one each, over its shards. A shard may be
            empty: pass sums, never means.
        every: ``every(n)`` is true in each n-th step of the run, bad ones counted: it follows from
            ``state.step``, which the host knows and a resumed run goes on with.
        weight_decay: Of the group.
        rows: Numbers of rows of the matrices that a fused one holds; None for one.
    """

    step: Tensor
    lr: Tensor
    values: Tensors
    gradients: Tensors
    total: Callable[[Sequence[Tensor]], Tensors]
    every: Callable[[int], bool]
    weight_decay: float = 0.0
    rows: tuple[int, ...] | None = None


Apply = Callable[[Tensors, State, At], tuple[Tensors, State]]


@attrs.frozen(eq=False)
class Transform:
    """One link of a chain; ``transform`` makes one.

    Attributes:
        apply: The function.
        state: What makes each entry of a parameter's state.
        whole: Whether it needs whole matrices.
        name: For messages and checkpoints.
        dtype: In which directions travel to their owner and back; None for float32 or wider.
        options: Of ``adam``, ``decay`` and ``scale``, which the optimizer can do in other ways.
    """

    apply: Apply
    state: Mapping[str, Callable[[Tensor], Tensor]]
    whole: bool
    name: str
    dtype: torch.dtype | None = None
    options: Mapping[str, Any] = {}

    @property
    def ends_in_decay(self) -> bool:
        """Whether it is ``decay``, which the optimizer can do with the update."""
        return self.name == "decay" and "rate" in self.options


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
            ones of the same shapes and changes none in place. It reads nothing on the host: a step
            may be bad, and is then computed and not written.
        state: By name what makes an entry before the first step, from the parameter's values, or
            from zeros of a whole matrix: ``torch.zeros_like``. Of a local transform it has the
            shape of the values, or is one number.
        whole: Whether directions, state and ``at`` have to hold whole matrices ``[o i]``, all of
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


def momentum(
    beta: float = 0.95, *, nesterov: bool = True, warmup: int = 0, start: float = 0.85
) -> Transform:
    """``m <- b m + (1 - b) d``; the direction is ``(1 - b) d + b m``, without Nesterov ``m``.

    Args:
        beta: The decay rate ``b``.
        nesterov: Whether the direction is mixed in once more.
        warmup: Good steps in which ``b`` rises linearly from ``start``.
        start: The first ``b`` of a warm-up.

    References:
        https://proceedings.mlr.press/v28/sutskever13.html
    """
    check_decay_rates(beta, start)
    check_integers(warmup=(warmup, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        if not warmup:
            m = torch._foreach_lerp(state["momentum_buffer"], d, 1 - beta)
            return [*(torch._foreach_lerp(d, m, beta) if nesterov else m)], {
                "momentum_buffer": [*m]
            }
        b = start + (beta - start) * (at.step / warmup).clamp(max=1)
        m = [old.lerp(x, (1 - b).to(x)) for old, x in zip(state["momentum_buffer"], d, strict=True)]
        ahead = [x.lerp(y, b.to(x)) for x, y in zip(d, m, strict=True)] if nesterov else m
        return ahead, {"momentum_buffer": m}

    return transform(apply, {"momentum_buffer": torch.zeros_like}, name="momentum")


def adam(beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8) -> Transform:
    """``m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps)``, ``v`` a mean of squares.

    With ``decay`` behind it at most, it is torch's fused AdamW.

    Args:
        beta1: Decay rate of the mean ``m``.
        beta2: Decay rate of the mean square ``v``.
        eps: Added to the root.

    References:
        https://arxiv.org/abs/1412.6980
    """
    check_decay_rates(beta1, beta2)

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        m = torch._foreach_lerp(state["exp_avg"], d, 1 - beta1)
        v = torch._foreach_lerp(state["exp_avg_sq"], torch._foreach_mul(d, d), 1 - beta2)
        c1, c2 = [(1 - b**at.step).to(m[0]) for b in (beta1, beta2)]
        mean = torch._foreach_div(m, [c1] * len(m))
        root = torch._foreach_sqrt(torch._foreach_div(v, [c2] * len(v)))
        torch._foreach_add_(root, eps)
        return [*torch._foreach_div(mean, root)], {"exp_avg": [*m], "exp_avg_sq": [*v]}

    state = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}
    options = {"betas": (beta1, beta2), "eps": eps}
    return transform(apply, state, name="adam", options=options)


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
        mixed = torch._foreach_lerp(state["exp_avg"], d, 1 - beta1)
        mean = torch._foreach_lerp(state["exp_avg"], d, 1 - beta2)
        torch._foreach_sign_(mixed)  # new memory
        return [*mixed], {"exp_avg": [*mean]}

    return transform(apply, {"exp_avg": torch.zeros_like}, name="lion_sign")


def decay(rate: float = 0.1, *, everything: bool = False) -> Transform:
    """``d + rate w``: decoupled weight decay, per unit of learning rate.

    Args:
        rate: The group's ``weight_decay``.
        everything: Whether embeddings, norms and biases decay too. By default they do not, as with
            ``fk.adamw``, unless the chain is that of their role or of a parameter's full name.

    References:
        https://arxiv.org/abs/1711.05101
    """

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        if not at.weight_decay:
            return d, state
        return [*torch._foreach_add(d, at.values, alpha=at.weight_decay)], state

    return _decaying(apply, rate, everything, "decay")


def cautious_decay(rate: float = 0.1, *, everything: bool = False) -> Transform:
    """``d + rate w`` where ``d w > 0``, else ``d``: only what moves towards zero decays.

    Args:
        rate: The group's ``weight_decay``.
        everything: See ``decay``.

    References:
        https://arxiv.org/abs/2510.12402
    """

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        rate = at.weight_decay
        pairs = zip(d, at.values, strict=True)
        return [x + rate * w * (x * w > 0) for x, w in pairs] if rate else d, state

    return _decaying(apply, rate, everything, "cautious_decay")


def _decaying(apply: Apply, rate: float, everything: bool, name: str) -> Transform:
    check_numbers(rate=(rate, 0))
    return transform(apply, name=name, options={"rate": rate, "everything": everything})


def scale(factor: float) -> Transform:
    """``factor d``; the last link of a chain, decay included: its group's ``lr_scale``.

    Args:
        factor: By what the learning rate of the chain is multiplied.
    """
    check_numbers(factor=(factor, 0))

    return transform(_by_the_optimizer, name="scale", options={"lr_scale": factor})


def stochastic_rounding(seed: int = 0) -> Transform:
    """Parameters in bfloat16 are rounded up or down at random; the last link of a chain.

    The mean is right, and the bits are the same in every layout; see ``fk.adamw``.

    Args:
        seed: Seed of the rounding.
    """
    check_integers(seed=(seed, 0))
    options = {"rounding_seed": seed}
    return transform(_by_the_optimizer, name="stochastic_rounding", options=options)


def _by_the_optimizer(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
    return d, state


def clip_value(most: float) -> Transform:
    """``min(max(d, -most), most)``, elementwise.

    Args:
        most: The bound.

    References:
        https://arxiv.org/abs/2305.14342
    """
    check_numbers(most=(most, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
        return [x.clamp(-most, most) for x in d], state

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


def middle_of(chain: Sequence[Transform]) -> slice:
    """Where the transforms of a chain are that run on owners."""
    wholes = [number for number, each in enumerate(chain) if each.whole]
    return slice(wholes[0], wholes[-1] + 1) if wholes else slice(len(chain), len(chain))


def check_chain(where: str, chain: Sequence[Any], like: Tensor) -> set[str]:
    """Try each transform of a chain on a small tensor, and refuse what breaks the rules.

    Args:
        where: What the chain is for, for messages.
        chain: The transforms.
        like: A tensor of its shape, dtype and device.

    Returns:
        What of ``at`` the transforms read; on owners it is named ``"whole values"`` and so on.

    Raises:
        TypeError: If something is no transform.
        ValueError: If two transforms name one state, or one returns other shapes or names, or
            changes its inputs in place.
    """
    names: dict[str, str] = {}
    for each in chain:
        if not isinstance(each, Transform):
            raise TypeError(
                f"the chain of {where} has a {type(each).__name__}; it takes what "
                "forgekit.optim.transform and functions such as forgekit.optim.momentum() return."
            )
        for name in each.state:
            if name in (*names, "step"):
                first = names.get(name, "the optimizer itself")
                raise ValueError(
                    f"{first} and {each.name} in the chain of {where} both name their state "
                    f"{name!r}; each entry of a checkpoint has one name. Rename one."
                )
            names[name] = each.name
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(like.shape, generator=generator).to(like) for _ in range(3)]
    directions, reads = [draw[0]], set()
    one = torch.ones((), dtype=torch.float64, device=like.device)
    on_owners = {*chain[middle_of(chain)]}
    for is_due in (True, False):
        at = At(one, one, [draw[1]], [draw[2]], lambda numbers: [*numbers], lambda _, d=is_due: d)
        for each in chain:
            watched = _Watched(at)
            directions = _try(where, each, directions, watched)
            reads |= {f"whole {name}" if each in on_owners else name for name in watched.read}
    return reads


def _try(where: str, each: Transform, directions: Tensors, at: Any) -> Tensors:
    """Apply a transform once; compare shapes, and inputs with copies of them."""
    shape = directions[0].shape
    state = {n: [make(torch.zeros_like(directions[0]))] for n, make in each.state.items()}
    text = f"{each.name} in the chain of {where}"
    for name, (entry,) in state.items():
        if not each.whole and entry.ndim and entry.shape != shape:
            raise ValueError(
                f"{text} makes its state {name!r} of shape {tuple(entry.shape)} for values of "
                f"{tuple(shape)}; on shards it has the shape of the values, or is one number. "
                "Pass whole=True to transform."
            )
    inputs = {
        "directions": directions,
        **state,
        "values": at.at.values,
        "gradients": at.at.gradients,
    }
    copies = {name: [t.clone() for t in tensors] for name, tensors in inputs.items()}
    made, new = each.apply([*directions], {n: [*t] for n, t in state.items()}, at)
    for name, tensors in copies.items():
        pairs = zip(tensors, inputs[name], strict=True)
        if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs):
            raise ValueError(
                f"{text} changes its {name} in place; a bad step could not be undone. Return new "
                "tensors."
            )
    shapes = {name: [tuple(t.shape) for t in tensors] for name, tensors in state.items()}
    returned = {name: [tuple(t.shape) for t in tensors] for name, tensors in new.items()}
    if [tuple(t.shape) for t in made] != [tuple(shape)] or returned != shapes:
        raise ValueError(
            f"{text} got directions of {tuple(shape)} with the state {shapes}, and returned "
            f"{[tuple(t.shape) for t in made]} with {returned}; shapes and names stay the same."
        )
    return [*made]


class _Watched:
    """An ``At`` that notes what is read."""

    def __init__(self, at: At) -> None:
        self.at, self.read = at, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.at, name)
