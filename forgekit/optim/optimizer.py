"""Optimizers composed of chains of transforms, each for a role or a pattern of names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgekit.checks import quoted
from forgekit.optim.chain import chain_optimizers
from forgekit.optim.groups import ROLES, check_patterns, decay_groups, roles_of
from forgekit.optim.owners import bundles
from forgekit.optim.rounding import key_of
from forgekit.optim.step_chain import Chain, step_chain
from forgekit.optim.transforms import Transform, check_chain, split_chain

Names = dict[Tensor, str]

NOTHING = torch.empty(6, 4, device="meta")
"""Stands in for the parameters of a chain that has none on this stage of a pipeline."""


def optimizer(
    model: nn.Module,
    chains: Mapping[str, Chain | Transform],
    *,
    lr: float = 1e-3,
    roles: Mapping[str, str] | None = None,
    split: Mapping[str, Sequence[int]] | None = None,
) -> Optimizer:
    """Build an optimizer from chains of transforms, which turn gradients into updates.

    A parameter goes to the first chain whose key is its role or a pattern of its name. Chains of
    only ``adam`` and ``decay`` run as torch's fused AdamW, bit for bit. Transforms of whole
    matrices run on the rank that owns each matrix, with state saved by the parameter's name.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        chains: By role (see ``roles_of``) or pattern of parameter names; ``"*"`` takes the rest.
        lr: Learning rate until a step's schedule sets it.
        roles: Patterns of parameter names to roles, for a model without a table.
        split: Patterns of parameter names to numbers of rows, for fused matrices: transforms of
            whole matrices see each part separately.

    Returns:
        A ``torch.optim.Optimizer`` that skips a bad step on the device; for several kinds of chains
        a chain of optimizers, each named after its transforms in ``parameters_by_optimizer``.

    Raises:
        ValueError: If a chain fits no parameter, or a parameter no chain; if a role is unknown; if
            a transform that needs whole matrices gets a vector; if two transforms of a chain
            use one state name; if one returns another shape, or changes its inputs in place.

    Examples:
        >>> import forgekit as fk
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
        >>> muon = (fk.optim.momentum(0.95), fk.optim.orthogonal(), fk.optim.decay(0.1))
        >>> adamw = (fk.optim.adam(0.9, 0.95), fk.optim.decay(0.1), fk.optim.scale(4.0))
        >>> both = fk.optimizer(model, {"1.weight": muon, "*": adamw})
        >>> fk.optim.parameters_by_optimizer(model, both)
        {'momentum + orthogonal + decay': ['1.weight'], 'AdamW': ['0.weight', '1.bias']}
    """
    decays = {p for g in decay_groups(model, 1.0) if g["weight_decay"] for p in g["params"]}
    by_key = {key: [c] if isinstance(c, Transform) else [*c] for key, c in chains.items()}
    taken = _assign(model, by_key, roles)
    check_patterns("split", model, split or ())
    members: list[Optimizer] = []
    fused: list[dict[str, Any]] = []
    for key, links in by_key.items():
        seeds = [each.options["rounding_seed"] for each in links if "rounding_seed" in each.options]
        chain = [each for each in links if "rounding_seed" not in each.options]
        scales = chain.pop().options if chain and "lr_scale" in chain[-1].options else {}
        names: Names = {model.get_parameter(name): name for name in taken[key]}
        for parameter, name in names.items():
            if (wholes := split_chain(chain)[1]) and parameter.ndim not in (2, 3):
                raise ValueError(
                    f"{name!r} has the shape {tuple(parameter.shape)}, and {wholes[0].name} in the "
                    f"chain of {key!r} takes matrices [o i] and stacks [e o i]. Assign another one."
                )
        reads = check_chain(key, chain, next(iter(names), NOTHING))
        groups = [{**group, **scales} for group in _groups(key, chain, names, decays, split or {})]
        for group, seed in itertools.product(groups, seeds):
            group["keys"] = [key_of(seed, names[p]) for p in group["params"]]
        if [each.kind for each in chain] + seeds in (["adam"], ["adam", "decay"]):
            fused += [{**group, **chain[0].options} for group in groups]
        elif groups:
            members.append(Composed(groups, chain, reads | {"step"} if seeds else reads, lr=lr))
    if fused:
        members.append(torch.optim.AdamW(fused, lr=lr, fused=True))
    return members[0] if len(members) == 1 else chain_optimizers(*members)


class Composed(Optimizer):
    """Updates parameters by one chain of transforms; ``optimizer`` creates one per chain.

    Attributes:
        chain: The transforms.
        label: Its name in tables and checkpoints.
        usual_lr: The default learning rate.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, params: list[dict[str, Any]], chain: Chain, reads: Collection[str], *, lr: float
    ) -> None:
        self.chain, self._reads, self.usual_lr = tuple(chain), frozenset(reads), 1e-3
        self.label = " + ".join(each.name for each in chain)
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "rows": None, "state_step": 0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters; return what ``closure``, called once, returned."""
        return step_chain(self, lambda _: self.chain, closure, reads=self._reads)

    def owned(self) -> dict[Tensor, list[int]]:
        """List the matrices in each parameter's stack whose state this rank holds."""
        owned: dict[Tensor, list[int]] = {}
        for group in self.param_groups if split_chain(self.chain)[1] else ():
            parts = len(group["rows"] or [1])
            for bundle in bundles(group["params"]):
                owned |= {p: [] for p in bundle.parameters}
                for parameter, number in bundle.owned:
                    owned[parameter] += range(number * parts, (number + 1) * parts)
        return owned

    def __getstate__(self) -> dict[str, Any]:
        names = ("chain", "_reads", "label", "usual_lr")
        return super().__getstate__() | {name: getattr(self, name) for name in names}


def _assign(
    model: nn.Module, chains: Mapping[str, Chain], table: Mapping[str, str] | None
) -> dict[str, list[str]]:
    """Map the key of each chain to the names of its trainable parameters."""
    needs_roles = table is not None or any(key in ROLES for key in chains)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    roles = roles_of(model, table) if needs_roles else dict.fromkeys(names, "")
    taken: dict[str, list[str]] = {key: [] for key in chains}
    for name, role in roles.items():
        fits = (k for k in chains if k == role or (k not in ROLES and fnmatchcase(name, k)))
        if (key := next(fits, None)) is None:
            of_role = f" of the role {role!r}" if role else ""
            raise ValueError(
                f"no chain takes {name!r}{of_role}, so it would never be trained; there are chains "
                f'for {quoted(chains)}. Add one for it, or for "*".'
            )
        taken[key].append(name)
    is_whole = not any(getattr(module, "is_absent", False) for module in model.modules())
    for key, its_names in taken.items():
        if is_whole and not its_names and key != "*":
            raise ValueError(
                f"the chain of {key!r} takes no parameter of {type(model).__name__}: it neither is "
                f"a role ({quoted(sorted({*roles.values()} - {''}) or ROLES)}) nor matches a "
                f"remaining name, such as {names[0]!r}. Remove it, or move it before others."
            )
    return taken


def _groups(
    key: str, chain: Chain, names: Names, decays: set[Tensor], split: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Group parameters by their decay, those that decay first, and by the rows of their parts."""
    groups: dict[tuple[float, tuple[int, ...] | None], list[Tensor]] = {}
    rules = [each.options for each in chain if "rate" in each.options]
    if len(rules) > 1:
        raise ValueError(f"the chain of {key!r} decays twice; remove one of them.")
    rule = rules[0] if rules else {"rate": 0.0, "everything": True}
    for parameter, name in names.items():
        rows = next((tuple(rows) for p, rows in split.items() if fnmatchcase(name, p)), None)
        decays_all = rule["everything"] or key in ("embedding", "norm", name)
        rate = rule["rate"] if decays_all or parameter in decays else 0.0
        groups.setdefault((rate, rows), []).append(parameter)
    kinds = sorted(groups, key=lambda kind: -kind[0])
    return [
        {"params": groups[rate, rows], "weight_decay": rate, "rows": rows} for rate, rows in kinds
    ]
