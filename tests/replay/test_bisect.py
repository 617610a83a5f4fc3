"""Bisection finds the rows that are guilty on their own, several at once, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainwright.replay.bisect import failing_rows


class Count:
    """Counts how often it was asked."""

    def __init__(self, culprits: set[int]) -> None:
        self.culprits, self.calls = culprits, 0

    def __call__(self, rows: Sequence[int]) -> bool:
        self.calls += 1
        assert rows
        return bool(self.culprits & set(rows))


@pytest.mark.parametrize("culprits", [{0}, {63}, {31, 32}, {0, 1, 62, 63}, {5, 17, 40}, set()])
def test_finds_exactly_the_culprits(culprits: set[int]) -> None:
    asked = Count(culprits)
    assert failing_rows(asked, 64) == sorted(culprits)
    assert asked.calls <= 1 + 2 * 6 * max(len(culprits), 1)


def test_a_culprit_in_company_only_is_not_named() -> None:
    assert failing_rows(lambda rows: {3, 60} <= set(rows), 64) == []


def test_one_alone_is_named_beside_a_pair_in_company() -> None:
    assert failing_rows(lambda rows: 7 in rows or {3, 60} <= set(rows), 64) == [7]


def test_many_culprits_stop_at_the_limit() -> None:
    asked = Count(set(range(1000)))
    assert failing_rows(asked, 1000, limit=3) == [0, 1, 2]
    assert asked.calls < 40


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
def test_small_and_odd_batches(n: int) -> None:
    assert failing_rows(lambda rows: n - 1 in rows, n) == ([n - 1] if n else [])
