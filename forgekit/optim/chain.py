"""Several optimizers that step, save and load as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def chain_optimizers(*optimizers: Optimizer) -> Chained:
    """Combine optimizers over disjoint parameters into one.

    Typically one is for matrices and one for everything else. Each keeps its own hyperparameters.
    The schedule sets the learning rate of all groups, times each group's ``lr_scale``.

    Args:
        *optimizers: At least one; no parameter may be in two of them. The result takes them over:
            step only the result. A chain among them is replaced by its members.

    Returns:
        An optimizer with the groups and the state of all members.

    Raises:
        ValueError: If no optimizer is given, or two of them hold the same parameter.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> matrices = torch.optim.Muon([{"params": [model.weight], "lr_scale": 20.0}])
        >>> rest = torch.optim.AdamW([model.bias], fused=True)
        >>> [len(group["params"]) for group in chain_optimizers(matrices, rest).param_groups]
        [1, 1]
    """
    members = [m for o in optimizers for m in (o.members if isinstance(o, Chained) else [o])]
    return Chained(members)


class Chained(Optimizer):
    """Optimizers that step together; ``chain_optimizers`` makes one.

    Members share one ``state``, keyed by parameter as in any other optimizer, which is all that a
    checkpoint needs.

    Attributes:
        members: The optimizers, in the order in which they step.
    """

    members: tuple[Optimizer, ...] = ()

    def __init__(self, members: list[Optimizer]) -> None:
        super().__init__([group for member in members for group in member.param_groups], {})
        self.members = tuple(members)
        for member in members:
            # Reading member.state[parameter] of another member's parameter creates an empty entry.
            self.state.update({key: entry for key, entry in member.state.items() if entry})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each member.

        Args:
            closure: Recomputes the loss; called once, before the first member.

        Returns:
            What the closure returned, else None.
        """
        loss = closure and torch.enable_grad()(closure)()
        for member in self.members:
            for name in ("grad_scale", "found_inf"):
                if getattr(self, name, None) is not None:
                    setattr(member, name, getattr(self, name))
            try:
                member.step()
            finally:
                member.__dict__.pop("grad_scale", None)
                member.__dict__.pop("found_inf", None)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept a member's group during construction; a later one would belong to no member.

        Raises:
            TypeError: After construction.
        """
        if self.members:
            raise TypeError(
                "no member of the chain would step this parameter group. Add it to an optimizer "
                "before chain_optimizers joins them."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give each member its own groups and the shared state."""
        groups = iter(self.param_groups)
        for member in self.members:
            its_groups = [next(groups) for _ in member.param_groups]
            member.__setstate__({"state": self.state, "param_groups": its_groups})
