"""Every fault of the table is seen, and without a fault its check sees nothing.

The default run has the first row of each room; ``make faults`` has all, and
``ARGS="-k 'parallel:'"`` those of one room.
"""

from __future__ import annotations

import re

import pytest
from faults.planting import function
from faults.table import all_checks, all_faults, default_faults, run

import forgekit as fk
from forgekit.steps import make_step as make_step_file

FAULTS = all_faults()
DEFAULT = default_faults()
CHECKS = {FAULTS[name].check for name in DEFAULT}


def _rows(names, default):
    rest = [name for name in names if name not in default]
    return [*sorted(default), *(pytest.param(name, marks=pytest.mark.oracle) for name in rest)]


@pytest.mark.parametrize("name", _rows(FAULTS, DEFAULT))
def test_a_fault_is_seen(name):
    fault = FAULTS[name]
    seen = run(fault.check, name, by_default=name in DEFAULT)
    if isinstance(seen, dict):
        assert not seen[fault.seen] < fault.least, seen
    else:
        assert re.search(fault.seen, seen, re.S), seen or "nothing was seen"
        assert not seen.startswith("ranks ["), seen


@pytest.mark.parametrize("check", _rows(all_checks(), CHECKS))
def test_without_a_fault_there_is_nothing_to_see(check):
    seen = run(check, by_default=check in CHECKS)
    far = seen
    if isinstance(seen, dict):
        far = {what: error for what, error in seen.items() if not error < 1}
    assert not far, far


def test_every_check_has_a_fault():
    assert all_checks().keys() == {fault.check for fault in FAULTS.values()}


def test_a_function_that_is_gone_is_no_fault_that_nothing_sees():
    with pytest.raises(AssertionError, match="forgekit has 0 functions 'sum_slices_of', not one"):
        function("sum_slices_of", lambda original: None)().__enter__()


def test_what_is_planted_stands_wherever_the_function_is_called_and_counts_its_calls():
    clip = fk.clip
    totals = fk.Totals.of(targets=8, grad_sq=16.0, loss_scale=1.0)
    with function("clip", lambda original, *args: "planted")() as count:
        assert fk.clip is make_step_file.clip is not clip
        assert fk.clip(totals) == "planted"
    assert fk.clip is make_step_file.clip is clip
    assert count.calls == 1
