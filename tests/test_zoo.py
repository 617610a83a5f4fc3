"""One seed of some rows of each group of the zoo: faults are named among the first three, all else is quiet.

One row of each group, of those that take about a second. The whole zoo takes five minutes:
``python -m benchmarks.zoo``.
"""

from __future__ import annotations

import pytest

from zoo import judge

ENTRIES = judge.load()
ROWS = ["A01", "D01", "G06", "H02", "I01", "K02", "L03", "M02", "O01", "P04", "S05", "T03"]
FAULTS = [name for name in ROWS if ENTRIES[name].labels]
HEALTHY = [name for name in ROWS if not ENTRIES[name].labels]


def test_each_group_has_a_row() -> None:
    assert sorted(name[0] for name in ROWS) == sorted({name[0] for name in ENTRIES})


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
