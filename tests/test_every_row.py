"""A table of rows fails once, and names every row that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rows import each_row

seen: list[tuple[int, int, str]] = []


@each_row("b", [1, 2])
@each_row(("a", "name"), [(1, "one"), (2, "two")])
def test_every_row_is_gone_through(a: int, name: str, b: int, tmp_path: Path) -> None:
    assert tmp_path.is_dir()
    seen.append((a, b, name))
    assert len(seen) == len(set(seen))


def test_all_rows_that_fail_are_named() -> None:
    @each_row("number", range(4))
    def is_odd(number: int) -> None:
        assert number % 2 == 1, "even"

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 4 rows:.*\[0\] AssertionError: even.*\[2\] Assert"):
        is_odd()


def test_a_table_without_rows_is_no_test() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        each_row("a", [])
