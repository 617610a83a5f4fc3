"""Finds the source line of a finding: where the affected object is made or called, or the recorded call nearest to it.

A check says what its findings point at (``Check.points_at``). The user's source is parsed only for findings without a
line. A line of an object is returned only if exactly one is possible.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainwright.doctor.discovery import check_of
from trainwright.doctor.finding import Calls, line_of_stage
from trainwright.runs.records import Found

Lines: TypeAlias = tuple[str | None, str | None]
"""The line that causes a finding, and another line that shows it; None if it is unknown."""

MAX_FILES = 400  # source files of the program; further ones are not read
MAX_LINES_OF_ONE_PLACE = 3
"""Lines at most this far apart count as one place, such as two calls that split the data."""
_NOT_USERS = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parents[1]}/",
    *{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")},
)
_SCHEDULER_NAMES = frozenset(torch.optim.lr_scheduler.__all__)
_OBJECTS_OF_TOPICS = {"optim": "optimizer", "schedule": "scheduler", "data": "dataset", "model": "model"}
"""Default of ``points_at`` for a finding without a module and without an operation."""
_RATES = frozenset({"lr", "learning_rate"})
_SPLITS = frozenset({"random_split", "train_test_split", "Subset", "KFold", "StratifiedKFold"})
_SEEDS = frozenset({"manual_seed", "manual_seed_all", "seed_everything", "set_seed", "seed"})
_INITIALIZERS = frozenset(name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_"))
_METHODS_THAT_INITIALIZE = frozenset({"normal_", "uniform_", "fill_", "zero_", "copy_", "mul_"})


class SourceFile:
    """The syntax tree of a class, a function or a file, with the line numbers of its file."""

    def __init__(self, name: str, text: str, first_line: int = 1) -> None:
        self.name, self.text, self._first_line = Path(name).name, text, first_line

    @cached_property
    def tree(self) -> ast.AST:
        """The syntax tree. Empty if the text is no valid Python: a notebook command, or a file that has changed."""
        try:
            return ast.parse(textwrap.dedent(self.text))
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[])

    @classmethod
    def of(cls, thing: type | CodeType | ModuleType) -> SourceFile | None:
        """Return the source of a class, function or module of the user; None for library code or without a file."""
        try:
            name = inspect.getsourcefile(thing) or ""
            if not _is_users(name):
                return None
            if isinstance(thing, ModuleType):
                return cls(name, Path(name).read_text(encoding="utf-8"))
            lines, first = inspect.getsourcelines(thing)
        except (TypeError, OSError, ValueError):
            return None
        return cls(name, "".join(lines), max(1, first))

    def lines(self, nodes: Iterator[ast.AST]) -> list[int]:
        """Return the line numbers of the nodes in the file, sorted."""
        return sorted({getattr(node, "lineno", 1) + self._first_line - 1 for node in nodes})

    def line(self, nodes: Iterator[ast.AST], span: int = 0) -> str | None:
        """Return the line of the nodes, such as ``train.py:44``; None unless all are within ``span`` lines."""
        lines = self.lines(nodes)
        return f"{self.name}:{lines[0]}" if lines and lines[-1] - lines[0] <= span else None

    def sets(self, names: Set[str]) -> Iterator[ast.AST]:
        """Yield assignments to attributes with these names, of any object."""
        every = (node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))
        return (node for node in every if isinstance(node.ctx, ast.Store) and node.attr in names)

    def calls(self, names: Set[str]) -> Iterator[ast.Call]:
        """Yield calls of functions with these names, such as ``torch.optim.AdamW(...)`` for ``AdamW``."""
        return (node for node in self._every_call() if _last(node.func) in names)

    def passes(self, names: Set[str]) -> Iterator[ast.Call]:
        """Yield calls with a keyword argument of one of these names, such as ``AdamW(params, lr=0.1)`` for ``lr``."""
        return (node for node in self._every_call() if any(each.arg in names for each in node.keywords))

    def binds(self, names: Set[str]) -> Iterator[ast.AST]:
        """Yield assignments to variables with these names."""
        every = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        return (node for node in every if isinstance(node.ctx, ast.Store) and node.id in names)

    def assigned(self, name: str) -> Iterator[ast.AST]:
        """Yield assignments to ``self.name``."""
        return (node for node in self.sets({name}) if _is_own(node))

    def function(self, name: str) -> Iterator[ast.AST]:
        """Yield the functions with this name."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name)

    def initializes(self, kind: str) -> Iterator[ast.AST]:
        """Yield the calls that initialize weights: those in an ``if`` that names the class ``kind``, otherwise all."""
        calls = [node for node in self._every_call() if _initializes_weight(node)]
        tests = [node for node in ast.walk(self.tree) if isinstance(node, ast.If) and kind in ast.unparse(node.test)]
        chosen = {id(each) for test in tests for statement in test.body for each in ast.walk(statement)}
        under = [node for node in calls if id(node) in chosen]
        yield from under or calls

    def sequential(self, made: nn.Sequential) -> Iterator[tuple[ast.expr, ...]]:
        """Yield the arguments of calls of ``nn.Sequential`` that may have made the module ``made``."""
        kinds = [type(each).__name__ for each in made]
        found: dict[bool, list[tuple[ast.expr, ...]]] = {True: [], False: []}
        for node in self.calls({"Sequential"}):
            names = [_last(arg.func) if isinstance(arg, ast.Call) else "" for arg in node.args]
            # variables, and functions that make a layer, may stand for any class
            may_be = (name == kind or not name[:1].isupper() for name, kind in zip(names, kinds))
            if len(names) == len(kinds) and all(may_be):
                found[any(map(operator.eq, names, kinds))].append(tuple(node.args))
        yield from found[True] or found[False]

    def _every_call(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))


def _is_users(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(_NOT_USERS) and "site-packages" not in name


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _initializes_weight(node: ast.Call) -> bool:
    """Return True for ``nn.init.normal_(m.weight)`` and ``m.weight.data.normal_()``."""
    name = _last(node.func)
    if name in _INITIALIZERS and node.args:
        return "bias" not in ast.unparse(node.args[0])
    return name in _METHODS_THAT_INITIALIZE and "weight" in ast.unparse(node.func)


Nodes: TypeAlias = Callable[[SourceFile], Iterator[ast.AST]]


class SourcePlaces:
    """The source of a program and of its objects.

    ``frames`` returns the function that contains the loop and its callers, ``values`` the values of its variables.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[object],
        schedulers: Sequence[object] = (),
        loaders: Sequence[object] = (),
        frames: Callable[[], Sequence[FrameType]] = list,
        values: Callable[[], Sequence[object]] = list,
    ) -> None:
        self._roots, self._optimizers, self._schedulers, self._loaders = roots, optimizers, schedulers, loaders
        self._frames, self._values = frames, values

    def place_of(self, found: Found, calls: Calls = ()) -> Lines:
        """Return the lines of a finding.

        A check may record the line that causes the finding and the line that shows it. If it records only one line and
        points at an object, the recorded line shows the finding, and the line of the object causes it.
        """
        where, caused = found.where, None
        if not (where.source and where.shown_at):
            with suppress(Exception):  # objects of the user may raise anything when they are read
                caused = self._line_of_object(found)
        shown = where.shown_at or where.source or line_of_stage(found, calls)
        source = caused or where.source or shown
        return source, shown if shown != source else None

    def _line_of_object(self, found: Found) -> str | None:
        """Return the line of the object of a finding; None if unknown or ambiguous, or if the finding names a rank."""
        check, where = check_of(found.code), found.where
        points_at = check.points_at if check is not None else ()
        if where.rank is not None or (where.source and not points_at):
            return None
        lines: dict[str, Callable[[], str | None]] = {
            "optimizer": self._line_of_optimizer,
            "scheduler": self._line_of_scheduler,
            "dataset": self._line_of_dataset,
            "validation": self._line_of_validation,
            "loader": lambda: self._line_that_makes(self._every_loader()[:1]),
            "sampler": lambda: self._line_that_makes(
                [getattr(each, "sampler", None) for each in self._every_loader()[:1]]
            ),
            "criterion": lambda: self._line_of_criterion(where.op or ""),
            "split": lambda: self._line_that_calls(_SPLITS, MAX_LINES_OF_ONE_PLACE),
            "seed": lambda: self._line_that_calls(_SEEDS, MAX_LINES_OF_ONE_PLACE),
            "load": self._line_of_load,
            "optimizer_load": lambda: self._line_that_loads(self._optimizers),
            "initialization": lambda: self._line_of_initialization(where.module or ""),
            "construction": lambda: self._line_of_module(where.module or "", None, is_made=True),
            "model": self._line_of_model,
        }
        chosen = [lines[each] for each in points_at if each in lines]
        if line := next((line for each in chosen if (line := each()) is not None), None):
            return line
        if where.source:
            return None
        if where.module is not None:
            return self._line_of_module(where.module, where.op, is_made=False)
        if where.op is not None:
            return self._line_of_op(where.op)
        by_topic = _OBJECTS_OF_TOPICS.get(found.code.partition(".")[0])
        return lines[by_topic]() if by_topic is not None and not chosen else None

    @cached_property
    def _program(self) -> tuple[tuple[SourceFile, ...], ...]:
        """The function that contains the loop, then its file, then all files of the program."""
        code = next((each.f_code for each in self._frames()), None)
        function = SourceFile.of(code) if code is not None else None
        known = {id(each): each for each in list(sys.modules.values())}  # __main__ may have a second name
        modules = [each for each in known.values() if _is_users(getattr(each, "__file__", None) or "")]
        files = [file for each in modules if (file := SourceFile.of(each)) is not None][:MAX_FILES]
        if code is None or function is None:
            return (tuple(files),)
        own: list[SourceFile] = []
        with suppress(OSError, ValueError):
            own = [SourceFile(code.co_filename, Path(code.co_filename).read_text(encoding="utf-8"))]
        others = [each for each in files if not own or each.text != own[0].text]
        return (function,), tuple(own), (*own, *others)

    def _in_program(self, words: Set[str], nodes: Nodes, span: int = 0) -> str | None:
        """Return the line of the nodes, in the smallest part of the program that has exactly one.

        Files without any of the ``words`` are not parsed. If all lines are within ``span`` lines, they are one place.
        """
        return self._line_in(self._program, words, nodes, span)

    @staticmethod
    def _line_in(parts: Sequence[Sequence[SourceFile]], words: Set[str], nodes: Nodes, span: int = 0) -> str | None:
        for part in parts:
            named = (source for source in part if any(word in source.text for word in words))
            lines = [(source.name, lines) for source in named if (lines := source.lines(nodes(source)))]
            if len(lines) == 1 and lines[0][1][-1] - lines[0][1][0] <= span:
                return f"{lines[0][0]}:{lines[0][1][0]}"
        return None

    def _line_that_makes(self, objects: Sequence[object], kinds: frozenset[str] = frozenset()) -> str | None:
        """Return the line that makes the objects or, if none are known, an object of these ``kinds``.

        If several lines make objects of their class, returns the line that assigns them to a variable or an attribute.
        """
        names = {type(each).__name__ for each in objects} or kinds
        if len(names) > 1 and objects:
            return None
        in_all = self._line_in([self._program[-1]], names, lambda source: source.calls(names))
        return in_all or self._line_that_binds(objects) or self._line_that_calls(names)

    def _functions(self) -> Iterator[tuple[FrameType, SourceFile]]:
        """Yield the frame of the loop and those of its callers, each with its source."""
        for frame in self._frames():
            if (source := SourceFile.of(frame.f_code)) is not None:
                yield frame, source

    def _line_that_binds(self, objects: Sequence[object]) -> str | None:
        """Return the line that assigns the objects to a variable of the loop or of its callers, or to an attribute."""
        for frame, source in self._functions():
            values = dict(frame.f_locals)
            if line := source.line(source.binds(_names_of(objects, values))):
                return line
            for owner in values.values():
                names = _names_of(objects, _attributes_of(owner))
                if names and (line := self._in_class(owner, partial(SourceFile.sets, names=names))):
                    return line
        return None

    def _line_that_loads(self, objects: Sequence[object]) -> str | None:
        """Return the line in which the loop or a caller of it calls ``load_state_dict`` of one of the objects."""
        for frame, source in self._functions():
            calls = (node.func for node in source.calls({"load_state_dict"}))
            if line := source.line(each for each in calls if _is_part_of(each, objects, frame)):
                return line
        return None

    def _line_that_calls(self, names: Set[str], span: int = 0) -> str | None:
        return self._in_program(names, lambda source: source.calls(names), span)

    def _line_of_optimizer(self) -> str | None:
        """Return the line that makes the optimizer; if a library makes it, the only one that passes a learning rate."""
        names = {type(each).__name__ for each in self._optimizers}
        is_users = any(name in source.text for source in self._program[-1] for name in names)
        if is_users:
            return self._line_that_makes(self._optimizers)
        return self._in_program(_RATES, lambda source: source.passes(_RATES))

    def _line_of_scheduler(self) -> str | None:
        """Return the line that makes the scheduler; without one, the line that makes the optimizer."""
        return self._line_that_makes(self._schedulers, _SCHEDULER_NAMES) or self._line_of_optimizer()

    def _line_of_model(self) -> str | None:
        """Return the line of ``forward`` of the model; None if there are several models."""
        return (
            self._in_class(self._roots[0], lambda source: source.function("forward")) if len(self._roots) == 1 else None
        )

    def _line_of_load(self) -> str | None:
        """Return the line that loads a state of the model; of several, the one with a keyword such as ``strict``."""
        names = {"load_state_dict"}
        if line := self._line_that_loads(self._roots):
            return line
        not_strict = self._in_program(names, lambda source: (each for each in source.calls(names) if each.keywords))
        return not_strict or self._line_that_calls(names) or self._line_that_calls({"from_pretrained"})

    def _line_of_dataset(self) -> str | None:
        """Return the line of the dataset's method that reads a sample, else that which makes the dataset or loader."""
        loaders = self._every_loader()[:1]
        datasets = [inner for each in loaders for inner in _datasets_of(each)]
        for each in datasets:
            for name in ("__getitem__", "__iter__"):
                if line := self._in_class(each, partial(SourceFile.function, name=name)):
                    return line
        made = (self._line_that_makes([each]) for each in (*datasets, *loaders))
        return next((line for line in made if line), None)

    def _line_of_validation(self) -> str | None:
        """Return the line that assigns the dataset or the loader of the only loader besides the first one."""
        first, *others = self._every_loader() or [None]
        others = list({id(each): each for each in others if each is not first}.values())
        datasets = (inner for each in others for inner in _datasets_of(each))
        made = (self._line_that_binds([each]) for each in (*datasets, *others))
        return next((line for line in made if line), None) if len(others) == 1 else None

    def _every_loader(self) -> list[object]:
        return [*self._loaders, *(each for each in self._values() if isinstance(each, DataLoader))]

    def _line_of_criterion(self, op: str) -> str | None:
        """Return the line that makes the loop's only module of a loss function: ``CTCLoss`` of ``ctc_loss``."""
        stem = op.replace("_", "").removesuffix("loss")
        names = {name for name in vars(nn) if name.lower() == f"{stem}loss"}
        owners = [each for frame in self._frames() for each in frame.f_locals.values()]
        values = [value for each in owners for value in (each, *_attributes_of(each).values())]
        found = {id(each): each for each in values if type(each).__name__ in names}
        return self._line_that_makes(list(found.values())) if len(found) == 1 else None

    def _line_of_op(self, op: str) -> str | None:
        """Return the line that calls an operation in the class of a model, or else in the program."""
        classes = (self._in_class(root, lambda source: source.calls({op})) for root in self._roots)
        return next((line for line in classes if line), None) or self._line_that_calls({op})

    def _line_of_initialization(self, path: str) -> str | None:
        modules = [each for root in self._roots if (each := dict(root.named_modules()).get(path)) is not None]
        kinds = {type(each).__name__ for each in modules}
        kind = kinds.pop() if len(kinds) == 1 else ""
        words, span = _INITIALIZERS | _METHODS_THAT_INITIALIZE, MAX_LINES_OF_ONE_PLACE
        nodes = partial(SourceFile.initializes, kind=kind)
        in_loop = self._line_in(self._program[:-1][:1], words, nodes, span)  # initializes after the classes have
        in_class = (line for each in modules if (line := self._in_class(each, nodes, span)))
        return in_loop or next(in_class, None) or self._in_program(words, nodes, span)

    def _line_of_module(self, path: str, op: str | None, *, is_made: bool) -> str | None:
        """Return the line that makes a module, or calls it or its ``op``, in the innermost user class around it."""
        for root in self._roots:
            parts, modules = path.split("."), dict(root.named_modules())
            known = next(depth for depth in range(len(parts), -1, -1) if ".".join(parts[:depth]) in modules)
            for depth in range(known, -1, -1):
                owner = modules[".".join(parts[:depth])]
                name = next((part for part in parts[depth : depth + 1]), "")
                wanted = _op_or_call(name, op if depth == len(parts) else None)
                made = None
                if name:
                    assigned = partial(SourceFile.assigned, name=name)
                    made = self._line_that_replaces(owner, name) or self._in_class(owner, assigned)
                used = self._in_class(owner, wanted) if wanted is not None else None
                if line := (made or used) if is_made else (used or made):
                    return line
            if known and (line := self._line_in_sequential(modules, parts[:known])):
                return line
        return None

    def _line_in_sequential(self, modules: dict[str, nn.Module], parts: Sequence[str]) -> str | None:
        """Return the line of a child in the call of ``nn.Sequential`` that makes its parent."""
        parent, index = modules[".".join(parts[:-1])], parts[-1]
        if not isinstance(parent, nn.Sequential) or index not in parent._modules:
            return None
        number = list(parent._modules).index(index)
        return self._in_program({"Sequential"}, lambda source: (args[number] for args in source.sequential(parent)))

    def _line_that_replaces(self, owner: object, name: str) -> str | None:
        """Return the line in which the loop or a caller of it sets an attribute, such as ``model.fc = nn.Linear()``."""
        for frame, source in self._functions():
            if line := source.line(each for each in source.sets({name}) if _is_part_of(each, [owner], frame)):
                return line
        return None

    def _in_class(self, thing: object, nodes: Nodes, span: int = 0) -> str | None:
        """Return the line in the class of an object, else in the nearest base class of the user that has one."""
        for kind in type(thing).__mro__[:-1]:
            source = SourceFile.of(kind)
            if source is not None and (line := source.line(nodes(source), span)):
                return line
        return None


def _datasets_of(loader: object) -> Iterator[object]:
    """Yield the dataset of a loader, and those that it wraps, from the innermost."""
    wrapped, depth = getattr(loader, "dataset", None), 0
    found: list[object] = []
    while wrapped is not None and depth < 8:
        found.append(wrapped)
        several = getattr(wrapped, "datasets", None)
        wrapped, depth = several[0] if several else getattr(wrapped, "dataset", None), depth + 1
    return reversed(found)


def _attributes_of(owner: object) -> dict[str, object]:
    """Return the attributes of an object of the user; {} for a Python module or a class."""
    attributes = getattr(owner, "__dict__", None)
    return attributes if isinstance(attributes, dict) and not isinstance(owner, ModuleType | type) else {}


def _names_of(objects: Sequence[object], values: dict[str, object]) -> set[str]:
    return {name for name, value in values.items() if any(value is each for each in objects)}


def _is_part_of(node: ast.AST, objects: Sequence[object], frame: FrameType) -> bool:
    """Return True for ``x.name`` if the variable ``x``, or ``self.x`` of ``self.x.name``, is one of the objects now."""
    owner = node.value if isinstance(node, ast.Attribute) else node
    variable = owner.value if isinstance(owner, ast.Attribute) else owner
    value = frame.f_locals.get(variable.id) if isinstance(variable, ast.Name) else None
    value = _attributes_of(value).get(owner.attr) if isinstance(owner, ast.Attribute) else value
    return value is not None and any(value is each for each in objects)


def _op_or_call(name: str, op: str | None) -> Nodes | None:
    """Return a function that finds the calls of an operation, or of ``self.name``, in a class."""
    if op is not None:
        return lambda source: source.calls({op})
    if not name:
        return None
    return lambda source: (node for node in source.calls({name}) if _is_own(node.func))
