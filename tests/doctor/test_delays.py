"""Faults that begin late, when looks are rare, are found as soon as those that begin at once."""

from __future__ import annotations

import pytest

from benchmarks.law_delays import ALLOWED, FAULTS, HARMLESS, delay_of
from tests.rows import each_row

pytestmark = pytest.mark.slow  # watched loops of 120 to 132 steps

ONSET, USUAL = 100, 20


@each_row(
    ("name", "code"),
    [
        ("gradients changed by hand", "law.update.gradients_are_those_made"),
        ("the same batch", "law.data.batches_vary"),
        ("no rate", "law.vitals.rates_are_positive"),
        ("a rate ten thousand times too large", "gradient.spike"),
    ],
)
def test_a_late_fault_is_found_in_time(name: str, code: str) -> None:
    family, fault = FAULTS[name]
    allowed = ALLOWED.get(family, USUAL)
    delay, codes = delay_of(fault, ONSET, ONSET + allowed, HARMLESS.get(name))
    assert delay is not None and delay <= allowed
    assert codes[0] == code
