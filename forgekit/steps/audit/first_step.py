"""What a run's first step proves, in one place: ``accumulate`` has one ``with`` around its loop.

Before anything is updated: that ranks that share sequences or matrices train what one rank would,
that a loss reads no shards, and that ranks run the same modules. What ``reduce_totals`` compares
then (rows, names, settings, replicas) is in ``agreement.py``. What every step checks (gradients
that were never reduced, changed names and numbers of rows) is not here: no switch turns it off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import attrs
from tensordict import TensorDictBase

from forgekit.mesh import data_ranks
from forgekit.parallel.fsdp import FsdpModules, watching_shards
from forgekit.parallel.layout import world_of
from forgekit.state import TrainState
from forgekit.steps.audit.agreement import digest_rows
from forgekit.steps.audit.plan import check_plan
from forgekit.steps.audit.positions import check_positions
from forgekit.steps.audit.running_alike import running_alike, runs_compiled
from forgekit.steps.forward import LossFn


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

    def look(self, batch: TensorDictBase) -> None:
        """Take the first micro-batch, whole sequences, before the model does.

        Raises:
            ValueError: On every rank, if ranks together would train another model than one.
        """
        if not self._is_due or world_of(self._state.mesh) == 1:
            return
        layout = self._state.layout
        self.digest = digest_rows(batch)
        if layout.context > 1:
            check_positions(self._state, batch, self._loss_fn)
        if layout.tensor > 1:
            check_plan(self._state, batch, self._loss_fn)

    def running(self, micro_batch: int) -> AbstractContextManager[None]:
        """Compare over the ranks which modules run in the first micro-batch."""
        model, is_first = self._state.model, self._is_due and micro_batch == 0
        if not is_first or world_of(self._state.mesh) == 1 or runs_compiled(model):
            return nullcontext()
        return running_alike(model, self._sharded, is_due=True)


@contextmanager
def auditing(
    state: TrainState, loss_fn: LossFn, sharded: FsdpModules, *, is_due: bool
) -> Iterator[Audit]:
    """Prove within the block what a run's first step has to.

    Args:
        state: The state; nothing in it changes.
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        sharded: The model's FSDP modules.
        is_due: Whether it is a first step whose audit is not switched off.
    """
    layout, audit = state.layout, Audit(state, loss_fn, sharded, is_due)
    rows_differ = data_ranks(state.mesh)[1] * layout.context > 1
    with watching_shards(state.model, sharded, is_due=is_due and rows_differ) as audit.read:
        yield audit
