"""What a run's first step proves, in one place: ``accumulate`` has one ``with`` around its loop.

Before anything is updated: that ranks that share sequences or matrices train what one rank would,
that a loss reads no shards, and that ranks run the same modules. What ``reduce_totals`` compares
then (rows, names, settings, replicas) is in ``agreement.py``. What every step checks (gradients
that were never reduced, changed names and numbers of rows) is not here: no switch turns it off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import attrs
from tensordict import TensorDictBase
from torch import nn

from forgekit.mesh import data_ranks
from forgekit.parallel.agreement import exchange
from forgekit.parallel.fsdp import FsdpModules, watching_shards
from forgekit.parallel.layout import world_of
from forgekit.state import TrainState
from forgekit.steps.audit.agreement import Meeting, compare_modules, digest_rows
from forgekit.steps.audit.plan import check_plan
from forgekit.steps.audit.positions import check_positions
from forgekit.steps.micro_batch import LossFn, check_output


@attrs.define
class Audit:
    """The proofs of one step; none of them where it is not a run's first.

    Attributes:
        digest: Of the rows of the first micro-batch, for the ranks to compare.
        read: Names of parameters whose shards the loss reads outside of the model.
    """

    _state: TrainState
    _loss_fn: LossFn
    _sharded: FsdpModules
    _is_due: bool
    digest: str = ""
    read: set[str] = attrs.field(factory=set)

    @contextmanager
    def looking_at(self, batch: TensorDictBase) -> Iterator[None]:
        """Look at a first micro-batch, whole sequences, and at its forward pass inside.

        Ranks pair their collectives by order and by nothing else. Where one skips a block that
        another runs, shards of two blocks meet, or ranks wait for each other. So each module that
        gathers its parameters, or shares sequences, matrices or experts, is compared before it
        runs, by small collectives of objects among the ranks that meet there.

        Raises:
            TypeError: If the model or a module that FSDP wraps returns a TensorDict.
            ValueError: On every rank, if they run different modules, or see ``look``.
        """
        model, gathered, mesh = self._state.model, set(self._sharded), self._state.mesh
        # Compiled code runs in place of hooks.
        is_compiled = any(m._compiled_call_impl is not None for m in model.modules())
        compares = self._is_due and not is_compiled
        with ExitStack() as hooks:
            if compares:
                modules = dict(model.named_modules())
                here: set[tuple[str, Meeting]] = {
                    (name, meeting)
                    for name, module in modules.items()
                    if (meeting := self._meeting(name, module, gathered)) is not None
                }
                # Ranks without experts have no module to gather there.
                for name, meeting in here.intersection(*exchange(here)):
                    at = name or type(model).__name__
                    compare = partial(compare_modules, mesh, at, meeting)
                    # In front of FSDP's own hook.
                    hook = modules[name].register_forward_pre_hook(compare, prepend=True)
                    hooks.enter_context(hook)
            self.look(batch)
            for module in (model, *gathered):
                hooks.enter_context(module.register_forward_hook(check_output))
            yield
        if compares:
            compare_modules(mesh)

    def _meeting(
        self, name: str, module: nn.Module, gathered: Collection[nn.Module]
    ) -> Meeting | None:
        """The ranks that have to run a module together; others may run it more or less often."""
        layout = self._state.layout
        if module in gathered or (layout.experts > 1 and "dispatch" in vars(module)):
            return "world"
        if layout.context > 1 and "attend" in vars(module):
            return "cp"
        return "tp" if name in layout.styles else None

    def look(self, batch: TensorDictBase) -> None:
        """Take the first micro-batch, whole sequences, before the model does.

        Raises:
            ValueError: On every rank, if ranks together would train another model than one.
        """
        if not self._is_due:
            return
        self.digest = digest_rows(batch)
        if self._state.layout.context > 1:
            check_positions(self._state, batch, self._loss_fn)
        if self._state.layout.tensor > 1:
            check_plan(self._state, batch, self._loss_fn)


@contextmanager
def auditing(
    state: TrainState, loss_fn: LossFn, sharded: FsdpModules, *, audit: bool, is_begun: bool
) -> Iterator[Audit]:
    """Prove within the block what a run's first step has to.

    Args:
        state: The state; nothing in it changes.
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        sharded: The model's FSDP modules.
        audit: Whether to; the switch of ``accumulate``.
        is_begun: Whether an earlier call of the step has looked at its first micro-batch.
    """
    # `agreed` comes with the first step's collective: nothing has been updated before.
    is_first = audit and state.agreed is None and world_of(state.mesh) > 1
    proofs = Audit(state, loss_fn, sharded, is_first and not is_begun)
    if is_first and data_ranks(state.mesh)[1] * state.layout.context > 1:  # whose rows differ
        with watching_shards(state.model, sharded) as proofs.read:
            yield proofs
    else:
        yield proofs
