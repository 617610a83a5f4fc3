"""One seed of the whole zoo: every fault named among the first three, no alarm for a healthy run."""

from __future__ import annotations

import pytest

from zoo import judge

ENTRIES = judge.load()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in sorted(ENTRIES.items()) if entry.labels])
def test_a_fault_is_named(name: str) -> None:
    score, _ = judge.run(ENTRIES[name], 0)
    assert not score.early and not score.failed, (score.said, score.error)
    assert score.rank is not None and score.rank < 3, score.said
    assert score.located is not False, (score.where, score.truth)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in sorted(ENTRIES.items()) if not entry.labels])
def test_a_healthy_run_raises_no_alarm(name: str) -> None:
    score, _ = judge.run(ENTRIES[name], 0)
    assert score.critical == [] and score.warned == [] and not score.failed, (score.said, score.error)
