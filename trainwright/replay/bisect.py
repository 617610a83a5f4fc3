"""Finds the samples that make a step fail, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def failing_rows(is_bad: Callable[[Sequence[int]], bool], n: int, limit: int = 8) -> list[int]:
    """Returns the rows of ``range(n)`` that each make ``is_bad`` true alone, ascending, at most ``limit``.

    ``is_bad(rows)`` replays the step with only these rows. A half that passes is not split further, so finding k rows
    costs about 2 k log2(n) calls. A row that fails only together with others is not found.
    """
    found: list[int] = []
    open_parts = [range(n)]
    while open_parts and len(found) < limit:
        part = open_parts.pop()
        if not part or not is_bad(part):
            continue
        if len(part) == 1:
            found.append(part[0])
            continue
        middle = len(part) // 2
        open_parts += [part[middle:], part[:middle]]
    return sorted(found)
