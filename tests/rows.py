"""Rows of a table as one test: what a test of its own for each would cost is more than the rows themselves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def each_row(
    names: str | Sequence[str], values: Iterable[Any], *, ids: Callable[[Any], str] = repr
) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize``, but one test: it goes through all rows and then names every one that failed.

    For rows that cost nothing and share nothing: fixtures, ``tmp_path`` among them, are the same for all.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [(each if len(keys) > 1 else (each,)) for each in values]
    assert table, "a table without rows tests nothing"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures = []
            for row in table:
                try:
                    test(**fixtures, **dict(zip(keys, row, strict=True)))
                except Exception as error:
                    at = ", ".join(ids(value) for value in row)
                    failures.append(f"[{at}] {type(error).__name__}: {error}")
            if failures:
                pytest.fail(f"{len(failures)} of {len(table)} rows:\n\n" + "\n\n".join(failures), pytrace=False)

        signature = inspect.signature(test)
        kept = [each for name, each in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
