"""Reads the source of the loop, and of the user's functions that it may call. Nothing of it is run."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import TypeVar

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
_File = tuple[str, ProgramSyntax]
"""Its name, and those of its functions that are read."""
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


def program_of(code: CodeType | None) -> ProgramSyntax | None:
    """The file of the function that holds the loop; None where it cannot be read."""
    tree = None if code is None else _tree_of(code.co_filename)
    if code is None or tree is None:
        return None
    return ProgramSyntax(tree, 0 if code.co_name == "<module>" else code.co_firstlineno)


def _tree_of(file: str) -> ast.Module | None:
    lines = linecache.getlines(file) if file.endswith(".py") else []
    if not 0 < len(lines) <= MOST_LINES:
        return None
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _further_functions(watched: WatchedObjects, code: CodeType, program: ProgramSyntax) -> Iterator[_File]:
    """The functions that only the objects of the loop reach: of other files, and methods of the class that has it."""
    lines: dict[str, set[int]] = {code.co_filename: set()}
    for each in own_functions([watched.values(), watched.subject.roots]):
        lines.setdefault(each.co_filename, set()).add(each.co_firstlineno)
    lines[code.co_filename] -= program.first_lines
    for file in [each for each in lines if lines[each]][:MOST_FILES]:
        if (tree := _tree_of(file)) is not None:
            yield Path(file).name, OtherFileSyntax(tree, lines[file])


def _facts(watched: WatchedObjects) -> WrittenFacts | None:
    code, program = watched.code(), program_of(watched.code())
    if code is None or program is None:
        return None
    evaluated, numbers = evaluations(program), watched.numbers()
    files: list[_File] = [("", program), *_further_functions(watched, code, program)]
    return WrittenFacts(
        file=Path(code.co_filename).name,
        functions=sum(len(of.functions) for _, of in files),
        unread=_found(unread_values, files),
        misplaced=_found(misplaced_sums, files),
        bests=_found(broken_bests, files),
        exchanged=_found(exchanged_arguments, files),
        evaluated_by=tuple(each.lineno for each in evaluated),
        periods=tuple(periods(program, evaluated, numbers)),
        unset=_unset(figures(program, evaluated), watched),
        worked_with=tuple(worked_with(program)),
    )


def _found(rule: Callable[[ProgramSyntax], Iterator[Row]], files: Sequence[_File]) -> tuple[Row, ...]:
    return tuple(replace(each, file=file) for file, program in files for each in rule(program))


def _unset(names: Sequence[str], watched: WatchedObjects) -> tuple[str, ...]:
    """Those that still hold the very constant of the source: a 0.0 that was computed is another object."""
    code, numbers = watched.code(), watched.numbers()
    constants = [
        part for each in (code.co_consts if code else ()) for part in (each if type(each) is tuple else (each,))
    ]
    held = [(name, numbers.get(name, numbers.get(f"{name}.0"))) for name in names]
    return tuple(name for name, value in held if value is not None and any(value is each for each in constants))
