"""The best value so far that a program keeps: what a value is compared with, and what it is then set to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from trainwright.doctor.loops import LOOPS, last_name
from trainwright.doctor.program.facts import BrokenBest
from trainwright.doctor.program.syntax import FunctionSyntax, ProgramSyntax, names_read, set_to, stored

WORDS = ("best", "lowest", "highest", "record")
"""Parts of the names of such values."""
KEEPS = ("deepcopy", "state_dict", "save", "clone")
"""What is called where a better value came."""
Branch: TypeAlias = tuple[ast.expr, str, list[ast.stmt]]
"""What a best value is compared with, ``<`` or ``>`` for how that stands to it, and what is done then."""
TURNED = {ast.Lt: "<", ast.LtE: "<", ast.Gt: ">", ast.GtE: ">"}


def broken_bests(program: ProgramSyntax) -> Iterator[BrokenBest]:
    """In the functions that the loop may reach."""
    for function in (each for each in program.functions if not each.is_open):
        for begin in (each for each in function.statements if isinstance(each, ast.Assign)):
            for name, sign in ((name, _sign(value)) for name, value in set_to(begin)):
                if sign != 0 and name not in function.in_nested:
                    best = KeptBest(function, name, sign)
                    if not best.is_set_in_a_loop(begin) and (kind := best.wrong):
                        yield BrokenBest(kind=kind, name=name, line=begin.lineno)


def _sign(value: ast.expr) -> int:
    """1 for infinity, -1 for minus infinity, 0 for what is neither: ``float("inf")``, ``math.inf``, ``-np.inf``."""
    if not isinstance(value, ast.Call | ast.Attribute | ast.UnaryOp):
        return 0
    text = ast.unparse(value).replace(" ", "").replace("'", "").replace('"', "").lower()
    if text in ("float(inf)", "float(+inf)", "math.inf", "np.inf", "numpy.inf", "torch.inf"):
        return 1
    return -1 if text in ("float(-inf)", "-float(inf)", "-math.inf", "-np.inf", "-numpy.inf", "-torch.inf") else 0


@dataclass
class KeptBest:
    """A name of a function that begins at ``sign`` times infinity in front of its loops."""

    function: FunctionSyntax
    name: str
    sign: int

    @property
    def wrong(self) -> str:
        """What is wrong with it; "" for nothing."""
        is_named = any(word in self.name.lower() for word in WORDS)
        if not self._inside:
            beaten = any(_keeps(body) for _, _, body in self._branches)
            return "never set" if self._branches and (is_named or beaten) and not self._set_later else ""
        if any(map(self._is_never_beaten, self._branches)) or any(map(self._is_turned, self._inside)):
            return "never beaten"
        if any(map(self._gets_another, self._branches)):
            return "set to another"
        if is_named and not any(map(self._is_guarded, self._inside)) and not self._leaves:
            return "set in each round"
        return ""

    def is_set_in_a_loop(self, statement: ast.Assign) -> bool:
        return statement in self._inside

    @cached_property
    def _loops(self) -> list[ast.stmt]:
        return [each for each in self.function.statements if isinstance(each, LOOPS)]

    @cached_property
    def _inside(self) -> list[ast.Assign]:
        """The statements within loops that set it."""
        inner = {id(node) for loop in self._loops for node in ast.walk(loop)}
        every = self.function.assigned(self.name)
        return [each for each in every if id(each) in inner and isinstance(each, ast.Assign)]

    @property
    def _set_later(self) -> bool:
        return len(self.function.assigned(self.name)) > 1

    @cached_property
    def _branches(self) -> list[Branch]:
        """Of each condition within a loop that compares it, both sides."""
        found = []
        for each in (n for loop in self._loops for n in ast.walk(loop) if isinstance(n, ast.If)):
            for compare, holds in _compared(each.test):
                other, sign = self._beside(compare)
                if other is not None:
                    body, orelse = (each.body, each.orelse) if holds else (each.orelse, each.body)
                    found += [(other, sign, body), (other, "<" if sign == ">" else ">", orelse)]
        return found

    def _beside(self, compare: ast.Compare) -> tuple[ast.expr | None, str]:
        left, right = compare.left, compare.comparators[0]
        sign = TURNED.get(type(compare.ops[0]), "") if len(compare.ops) == 1 else ""
        sides = [self.name in names_read(each) for each in (left, right)]
        if not sign or sides[0] == sides[1]:
            return None, ""
        return (left, sign) if sides[1] else (right, "<" if sign == ">" else ">")

    def _sets(self, body: list[ast.stmt]) -> Iterator[ast.expr]:
        """What the statements of a branch set it to."""
        for each in body:
            if isinstance(each, ast.Assign):
                yield from (value for name, value in set_to(each) if name == self.name)

    def _is_never_beaten(self, branch: Branch) -> bool:
        """Nothing lies beyond infinity."""
        _, sign, body = branch
        return sign == (">" if self.sign > 0 else "<") and any(True for _ in self._sets(body))

    def _is_turned(self, statement: ast.Assign) -> bool:
        """The larger of infinity and a value is infinity."""
        others = [each for each in self._inside if each is not statement]
        calls = [
            each for each in self._sets([statement]) if isinstance(each, ast.Call) and self.name in names_read(each)
        ]
        return not others and any(last_name(each) == ("max" if self.sign > 0 else "min") for each in calls)

    def _gets_another(self, branch: Branch) -> bool:
        """It is set to what has no name in common with what has beaten it, or to that with the other sign."""
        other, _, body = branch
        for value in self._sets(body):
            is_negated = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub)
            if is_negated and isinstance(value, ast.UnaryOp) and ast.dump(value.operand) == ast.dump(other):
                return True
            one, beaten = _names_in(value), _names_in(other)
            is_alike = self._made_of(one) & (beaten | {self.name}) or one & self._made_of(beaten)
            if one and beaten and not is_alike:
                return True
        return False

    def _made_of(self, names: set[str]) -> set[str]:
        """These names, and those that each of them alone was set from."""
        every = [each for each in self.function.statements if isinstance(each, ast.Assign)]
        return names | {name for each in every if len(stored(each)) == 1 and stored(each) <= names
                        for name in names_read(each.value)}  # fmt: skip

    def _is_guarded(self, statement: ast.Assign) -> bool:
        """Whether it stands behind a condition that comes of it, or is made of it."""
        made_of = {self.name}
        for each in self.function.statements:
            if isinstance(each, ast.Assign | ast.AnnAssign) and self.name in names_read(each.value):
                made_of |= stored(each)
        if made_of & names_read(statement.value):
            return True
        tests = [each for each in self.function.nodes if isinstance(each, ast.If | ast.While)]
        return any(made_of & names_read(each.test) for each in tests if statement in ast.walk(each))

    @property
    def _leaves(self) -> bool:
        """Whether a comparison with it may end a round before it is set."""
        tests = [each for each in self.function.nodes if isinstance(each, ast.If)]
        leaving = [each for each in tests if self.name in names_read(each.test)]
        return any(isinstance(n, ast.Continue | ast.Break | ast.Return) for each in leaving for n in ast.walk(each))


def _compared(test: ast.expr) -> Iterator[tuple[ast.Compare, bool]]:
    """The comparisons of a condition, each with whether it holds where the condition does."""
    if isinstance(test, ast.Compare):
        yield test, True
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from ((compare, not holds) for compare, holds in _compared(test.operand))
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        yield from (each for value in test.values for each in _compared(value))


def _names_in(value: ast.expr) -> set[str]:
    """Also those that it sets (``:=``)."""
    return {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}


def _keeps(body: list[ast.stmt]) -> bool:
    calls = [node for each in body for node in ast.walk(each) if isinstance(node, ast.Call)]
    return any(last_name(each) in KEEPS for each in calls)
