"""Reads the source of the loop, and of the user's functions that it may call. Nothing of it is run."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple, TypeVar

from trainwright.doctor.program.bests import broken_bests
from trainwright.doctor.program.evaluated import evaluations, figures, periods, worked_with
from trainwright.doctor.program.exchanged import exchanged_arguments
from trainwright.doctor.program.facts import (
    BrokenBest,
    ExchangedArguments,
    MisplacedSum,
    UnreadValue,
    WrittenFacts,
)
from trainwright.doctor.program.sums import misplaced_sums
from trainwright.doctor.program.syntax import OtherFileSyntax, ProgramSyntax
from trainwright.doctor.program.unread import unread_values
from trainwright.recorder.own_functions import own_functions
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.runlog.json_values import Facts, strict

MOST_LINES = 4000
"""Of a longer file nothing is read: that takes about 10 us a line."""
MOST_FILES = 8
Row = TypeVar("Row", UnreadValue, MisplacedSum, BrokenBest, ExchangedArguments)


class WrittenProbe(Probe):
    """Reads it at the first look. Later it is told again where a figure of the evaluations has got a value."""

    name = WrittenFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._is_read = False
        self._facts: WrittenFacts | None = None

    def values(self) -> Facts | None:
        if not self._is_read:
            self._is_read = True
            self._facts = _facts(self._watched)
        elif self._facts is not None and self._facts.unset:
            left = _unset(self._facts.unset, self._watched)
            if left == self._facts.unset:
                return None
            self._facts = replace(self._facts, unset=left)
        else:
            return None
        return None if self._facts is None else dict(strict(vars(self._facts)))


class _Rows(NamedTuple):
    """What the rules find in a file, and in how many functions."""

    functions: int
    unread: tuple[UnreadValue, ...]
    misplaced: tuple[MisplacedSum, ...]
    bests: tuple[BrokenBest, ...]
    exchanged: tuple[ExchangedArguments, ...]

    @classmethod
    def of(cls, program: ProgramSyntax) -> _Rows:
        return cls(
            len(program.functions),
            tuple(unread_values(program)),
            tuple(misplaced_sums(program)),
            tuple(broken_bests(program)),
            tuple(exchanged_arguments(program)),
        )


def program_of(code: CodeType | None) -> ProgramSyntax | None:
    """The file of the function that holds the loop; None where it cannot be read."""
    text = None if code is None else _text_of(code.co_filename)
    if code is None or text is None:
        return None
    return _program(text, 0 if code.co_name == "<module>" else code.co_firstlineno)


def _text_of(file: str) -> str | None:
    lines = linecache.getlines(file) if file.endswith(".py") else []
    return "".join(lines) if 0 < len(lines) <= MOST_LINES else None


def _tree_of(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=2)  # several probes read it
def _program(text: str, first_line: int) -> ProgramSyntax | None:
    tree = _tree_of(text)
    return None if tree is None else ProgramSyntax(tree, first_line)


@lru_cache(maxsize=64)  # of the files that a loop uses; their trees, some MiB each, are let go
def _rows_of(text: str, first_lines: frozenset[int]) -> _Rows | None:
    tree = _tree_of(text)
    return None if tree is None else _Rows.of(OtherFileSyntax(tree, first_lines))


@lru_cache(maxsize=2)
def _rows_of_loop(program: ProgramSyntax) -> _Rows:
    return _Rows.of(program)


def _further_files(watched: WatchedObjects, code: CodeType, program: ProgramSyntax) -> Iterator[tuple[str, _Rows]]:
    """The functions that only the objects of the loop reach: of other files, and methods of the class that has it."""
    lines: dict[str, set[int]] = {code.co_filename: set()}
    for each in own_functions([watched.values(), watched.subject.roots]):
        lines.setdefault(each.co_filename, set()).add(each.co_firstlineno)
    lines[code.co_filename] -= program.first_lines
    for file in [each for each in lines if lines[each]][:MOST_FILES]:
        text = _text_of(file)
        rows = None if text is None else _rows_of(text, frozenset(lines[file]))
        if rows is not None:
            yield Path(file).name, rows


def _facts(watched: WatchedObjects) -> WrittenFacts | None:
    code, program = watched.code(), program_of(watched.code())
    if code is None or program is None:
        return None
    evaluated, numbers = evaluations(program), watched.numbers()
    files = [("", _rows_of_loop(program)), *_further_files(watched, code, program)]
    return WrittenFacts(
        file=Path(code.co_filename).name,
        functions=sum(rows.functions for _, rows in files),
        unread=_placed((file, rows.unread) for file, rows in files),
        misplaced=_placed((file, rows.misplaced) for file, rows in files),
        bests=_placed((file, rows.bests) for file, rows in files),
        exchanged=_placed((file, rows.exchanged) for file, rows in files),
        evaluated_by=tuple(each.lineno for each in evaluated),
        periods=tuple(periods(program, evaluated, numbers)),
        unset=_unset(figures(program, evaluated), watched),
        worked_with=tuple(worked_with(program)),
    )


def _placed(found: Iterable[tuple[str, Sequence[Row]]]) -> tuple[Row, ...]:
    return tuple(replace(each, file=file) for file, rows in found for each in rows)


def _unset(names: Sequence[str], watched: WatchedObjects) -> tuple[str, ...]:
    """Those that still hold the very constant of the source: a 0.0 that was computed is another object."""
    code, numbers = watched.code(), watched.numbers()
    constants = [
        part for each in (code.co_consts if code else ()) for part in (each if type(each) is tuple else (each,))
    ]
    held = [(name, numbers.get(name, numbers.get(f"{name}.0"))) for name in names]
    return tuple(name for name, value in held if value is not None and any(value is each for each in constants))
