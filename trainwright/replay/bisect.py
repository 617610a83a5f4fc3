"""Which samples make an outcome bad: by halving, several culprits at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def guilty(bad: Callable[[Sequence[int]], bool], n: int, limit: int = 8) -> list[int]:
    """The samples of ``range(n)`` each of which makes ``bad`` true alone, in ascending order, at most ``limit``.

    ``bad(rows)`` runs the step with these rows only. A half that is good is left alone, so k culprits cost about
    2 k log2(n) calls. One that shows only in company with others is in no half alone: it is not named.
    """
    found: list[int] = []
    open_parts = [range(n)]
    while open_parts and len(found) < limit:
        part = open_parts.pop()
        if not part or not bad(part):
            continue
        if len(part) == 1:
            found.append(part[0])
            continue
        middle = len(part) // 2
        open_parts += [part[middle:], part[:middle]]
    return sorted(found)
