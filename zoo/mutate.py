"""New faults from healthy programs: every host, changed at one place by one operator.

The operators know nothing of training beyond names that every PyTorch program has, and nothing of the doctor. A mutant
is named ``host:operator:site``. Sites are counted in the order of the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zoo.mutation_operators import OPERATORS
from zoo.program import Change, Program

FOLDER, FURTHER_FOLDER = (Path(__file__).parent / name for name in ("hosts", "further"))
HOSTS = ("lora", "contrast", "policy", "diffusion", "gan", "multitask", "tables", "translate", "pictures", "language")
FURTHER = ("segment", "recommend", "forecast", "vae", "graph")
"""Written after the laws, by somebody else. None of their mutants is kept out."""


@dataclass(frozen=True)
class Mutant:
    """One changed host. ``line`` is the first that was changed, as the changed source counts."""

    host: str
    operator: str
    site: int
    change: Change

    @property
    def name(self) -> str:
        return f"{self.host}:{self.operator}:{self.site}"

    @property
    def line(self) -> int:
        return min(edit.first[0] for edit in self.change)

    @property
    def lines(self) -> tuple[int, ...]:
        """Where it was changed."""
        return tuple(sorted({edit.first[0] for edit in self.change}))

    @property
    def source(self) -> str:
        return program(self.host).changed(self.change)

    @property
    def diff(self) -> str:
        """In one line: what stood there, and what stands there now."""
        before, after = program(self.host).source.splitlines(), self.source.splitlines()
        gone = [line.strip() for line in before if line not in after] or [before[self.line - 1].strip()]
        new = [line.strip() for line in after if line not in before] or [after[self.line - 1].strip()]
        return f"{self.host}.py:{self.line}: {' | '.join(gone[:3])}  ->  {' | '.join(new[:3])}"

    @property
    def kept_out(self) -> bool:
        return is_kept_out(self.operator, self.host)


@cache
def program(host: str) -> Program:
    return Program((FURTHER_FOLDER if host in FURTHER else FOLDER) / f"{host}.py")


def is_kept_out(operator: str, host: str) -> bool:
    """Whether mutants of this pair are for the end only: a third of the pairs of the ten hosts, by hash."""
    return host not in FURTHER and int(hashlib.sha256(f"{operator}:{host}".encode()).hexdigest(), 16) % 3 == 0


@cache
def sites(host: str, operator: str) -> tuple[Mutant, ...]:
    """All mutants of a host by an operator that differ from the host and from each other."""
    found, seen = [], {program(host).source}
    for change in OPERATORS[operator](program(host)):
        mutant = Mutant(host, operator, len(found), change)
        if mutant.source not in seen:
            seen.add(mutant.source)
            found.append(mutant)
    return tuple(found)


def drawn(host: str, operator: str) -> Sequence[Mutant]:
    """Those mutants in the order of a hash."""
    return sorted(sites(host, operator), key=lambda each: hashlib.sha256(each.name.encode()).hexdigest())


def by_name(name: str) -> Mutant:
    host, operator, site = name.split(":")
    return sites(host, operator)[int(site)]


def everything() -> Iterator[Mutant]:
    for host in HOSTS:
        for operator in OPERATORS:
            yield from sites(host, operator)
