"""One seed of some rows of each group of the zoo: faults are named among the first three, all else is quiet.

One row in ten of a group, of those that take about a second. The whole zoo takes five minutes:
``python -m benchmarks.zoo``.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from zoo import judge

ENTRIES = judge.load()
ROWS = ["A01", "D01", "D09", "G06", "H02", "H09", "I01", "K02", "L03", "L16"]
ROWS += ["M02", "M11", "O01", "O10", "P04", "S05", "T03"]
FAULTS = [name for name in ROWS if ENTRIES[name].labels]
HEALTHY = [name for name in ROWS if not ENTRIES[name].labels]


def test_each_group_has_its_share() -> None:
    shares = {group: math.ceil(rows / 10) for group, rows in Counter(name[0] for name in ENTRIES).items()}
    assert Counter(name[0] for name in ROWS) == shares


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    score, _ = judge.run(ENTRIES[name], 0)
    assert not score.early and not score.failed, (score.said, score.error)
    assert score.rank is not None and score.rank < 3, score.said
    assert score.located is not False, (score.where, score.truth)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name: str) -> None:
    score, _ = judge.run(ENTRIES[name], 0)
    assert score.critical == [] and score.warned == [] and not score.failed, (score.said, score.error)
