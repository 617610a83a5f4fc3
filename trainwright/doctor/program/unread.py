"""What a program makes of its model and its data and nothing reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from trainwright.doctor.loops import last_name, name_of
from trainwright.doctor.program.facts import UnreadValue
from trainwright.doctor.program.syntax import (
    FunctionSyntax,
    ProgramSyntax,
    arguments,
    is_fresh,
    name_of_function,
    names_read,
    root_of,
    statement_value,
    stored,
    targets_of,
)

MODULES = ("torch", "nn", "F", "functional", "copy", "math", "np", "numpy")
"""Their functions do nothing but return a value, unless they end in an underscore."""
EFFECTS = ("load_state_dict", "train", "eval", "to", "cuda", "step", "backward", "save", "load", "pop", "next")
"""What is called for what it does: its result is often left over."""
OUTCOMES = (3, 4, 5)
"""Of a step of an environment: state, reward and end, perhaps split into two, perhaps with further information."""
LOOKS = ("item", "tolist", "numpy", "argmax", "argmin", "max", "min", "mean", "sum", "norm", "std", "var", "softmax",
         "sigmoid", "detach", "cpu", "len", "topk", "round", "int", "float", "eq")  # fmt: skip
"""What is called to look at something: its result may be there for a debugger."""
OF_LOSSES = ("loss", "reg", "penal", "kl", "aux", "term", "entropy", "div", "cost", "nll", "prior", "smooth", "best")
"""Parts of the names of what a loss is made of, or what is kept: nobody computes these to look at them."""
LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.Yield, ast.Try)


def unread_values(program: ProgramSyntax) -> Iterator[UnreadValue]:
    """The values that are made and never read, in the functions that the loop may reach."""
    for function in program.functions:
        if not function.is_open:
            yield from _never_read(program, function)
            yield from _only_counted(function)
            yield from _told_as_another(function)
            yield from _replaced(program, function)
            yield from _unused_parts(program, function)
            yield from _unread_arguments(program, function)
            yield from _unread_settings(program, function)
            yield from _unread_outcomes(program, function)


def _never_read(program: ProgramSyntax, function: FunctionSyntax) -> Iterator[UnreadValue]:
    """Names that are set or added to, and read nowhere. Those of a file or a notebook may be read elsewhere."""
    if isinstance(function.node, ast.Module):
        return
    for name in sorted(function.of_data - function.read - set(function.parameters)):
        statements = [] if name.startswith("_") else function.assigned(name)
        added = [each for each in statements if isinstance(each, ast.AugAssign | ast.Expr)]
        made = [each for each in statements if each not in added and not is_fresh(statement_value(each))]
        if added and not made:
            is_list = all(isinstance(each, ast.Expr) for each in added)
            if is_list and len(added) == len(statements):
                continue  # it was begun, and may be read, in a function around this one
            is_missed = not is_list and bool(_sums_of(function) & function.read)  # those beside it are read
            yield _unread("list" if is_list else "sum", name, added[0], is_missed=is_missed)
        elif made and not added and all(_is_costly(program, function, each) for each in made):
            yield _unread("value", name, made[-1], is_missed=not any(_is_a_look(program, function, m) for m in made))


def _only_counted(function: FunctionSyntax) -> Iterator[UnreadValue]:
    """Lists that grow by what comes of the data, and of which a function returns the length and nothing else."""
    grown = [each for each in function.statements if isinstance(each, ast.Expr) and stored(each) & function.of_data]
    counts = [each for each in function.nodes if isinstance(each, ast.Call) and name_of(each.func) == "len"]
    returned = {id(node) for each in function.statements if isinstance(each, ast.Return) for node in ast.walk(each)}
    for name in sorted({name for each in grown for name in stored(each)} - set(function.parameters)):
        put = {id(n) for each in grown for n in ast.walk(each) if isinstance(n, ast.Name)}
        counted = {id(call.args[0]): call for call in counts if call.args and name_of(call.args[0]) == name}
        reads = [
            id(n) for n in function.nodes
            if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) and id(n) not in put
        ]  # fmt: skip
        if reads and all(each in counted and id(counted[each]) in returned for each in reads):
            yield _unread("counted", name, next(each for each in grown if name in stored(each)))


def _told_as_another(function: FunctionSyntax) -> Iterator[UnreadValue]:
    """Parts of what a call returns that nothing reads, while another one of them is told under their name as well as
    under its own: ``{"loss": loss, "accuracy": loss}``.
    """
    tables = [dict(_told(node)) for node in function.nodes if isinstance(node, ast.Dict | ast.Call)]
    for statement in function.statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names = [name_of(each) for of in targets if isinstance(of, ast.Tuple) for each in of.elts]
        for name in (each for each in names if each.isidentifier() and each not in function.read):
            others = {table[name] for table in tables if name in table}
            if any(table.get(other) == other for table in tables for other in others & set(names)):
                yield _unread("told", name, statement)


def _told(node: ast.Dict | ast.Call) -> Iterator[tuple[str, str]]:
    """Names, and the variables that are given under them."""
    if isinstance(node, ast.Call):
        yield from ((each.arg, name_of(each.value)) for each in node.keywords if each.arg)
    else:
        pairs = [(key.value, value) for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)]
        yield from ((key, name_of(value)) for key, value in pairs if isinstance(key, str))


def _sums_of(function: FunctionSyntax) -> set[str]:
    return {name for each in function.statements if isinstance(each, ast.AugAssign) for name in stored(each)}


def _is_a_look(program: ProgramSyntax, function: FunctionSyntax, statement: ast.stmt) -> bool:
    """Whether a value may be computed to be looked at, or by a model that is called for what its hooks do."""
    if any(word in name.lower() for name in stored(statement) for word in OF_LOSSES):
        return False
    value = statement_value(statement)
    if isinstance(value, ast.Call) and name_of_function(function) != "forward":
        called, root = value.func, root_of(value.func)
        is_own = isinstance(called, ast.Name) and called.id in program.by_name
        is_object = isinstance(called, ast.Name) or (root is not None and root.id == "self")
        if is_object and not is_own and not last_name(value)[:1].isupper() and last_name(value) != "deepcopy":
            return True
    return any(last_name(each) in LOOKS for each in ast.walk(statement) if isinstance(each, ast.Call))


def _is_costly(program: ProgramSyntax, function: FunctionSyntax, statement: ast.stmt) -> bool:
    """Whether it is computed by calls that do nothing else, and nothing else that the statement sets is read."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or stored(statement) & function.read:
        return False
    if any(not isinstance(each, ast.Name) for each in targets_of(statement)):
        return False
    calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
    return bool(calls) and all(_only_returns(program, function, each) for each in calls)


def _only_returns(program: ProgramSyntax, function: FunctionSyntax, call: ast.Call) -> bool:
    name, root = last_name(call), root_of(call.func)
    if not name or name.endswith("_") or name in EFFECTS or name.startswith("register"):
        return False
    own = program.by_name.get(name_of(call.func))
    if own is not None:
        loose = [each for each in own.statements if isinstance(each, ast.Expr) and not stored(each)]
        return all(last_name(each.value) in ("train", "eval") or isinstance(each.value, ast.Constant) for each in loose)
    if root is None:
        return isinstance(call.func, ast.Attribute)  # a method of what another call returns
    if root.id[:1].isupper():
        return True  # an object is made
    return root.id in MODULES or root.id in function.of_data or name in ("DataLoader", "deepcopy", "len", "list", "sum")


def _replaced(program: ProgramSyntax, function: FunctionSyntax) -> Iterator[UnreadValue]:
    """What is set again in the same block before anything has read it."""
    for block in function.blocks:
        for place, statement in enumerate(block):
            name = _single(statement)
            if not name or name.startswith("_") or name not in function.of_data or name in function.in_nested:
                continue
            calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
            is_costly = bool(calls) and all(_only_returns(program, function, each) for each in calls)
            if is_costly and _is_replaced(name, block[place + 1 :]):
                is_once = block is function.node.body and not function.is_method
                is_missed = not is_once and not _is_a_look(program, function, statement)
                yield _unread("replaced", name, statement, is_missed=is_missed)


def _single(statement: ast.stmt) -> str:
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    return target.id if isinstance(target, ast.Name) else ""


def _is_replaced(name: str, later: Sequence[ast.stmt]) -> bool:
    for each in later:
        if name in names_read(each) | _added_to(each) or any(isinstance(n, LEAVES) for n in ast.walk(each)):
            return False
        if _single(each) == name:
            return True
    return False


def _added_to(statement: ast.stmt) -> set[str]:
    return {name for each in ast.walk(statement) if isinstance(each, ast.AugAssign) for name in stored(each)}


def _unused_parts(program: ProgramSyntax, function: FunctionSyntax) -> Iterator[UnreadValue]:
    """Parts of a batch that one loop over data reads and another one of the same shape does not."""
    for loop in _data_loops(function):
        parts = _parts(loop)
        for place, name in enumerate(parts):
            is_left = name and not name.startswith("_") and name not in function.read
            if is_left and _is_read_elsewhere(program, loop, place):
                yield _unread("part", name, loop, is_missed=False)


def _data_loops(function: FunctionSyntax) -> list[ast.For]:
    loops = [each for each in function.statements if isinstance(each, ast.For)]
    return [each for each in loops if names_read(each.iter) & function.of_data]


def _parts(loop: ast.For) -> list[str]:
    """The names of the parts of a batch, also where the batches are numbered."""
    target, over = loop.target, loop.iter
    if isinstance(over, ast.Call) and last_name(over) == "enumerate" and isinstance(target, ast.Tuple):
        target, over = target.elts[-1], over.args[0]
    is_plain = isinstance(over, ast.Name | ast.Attribute) or (isinstance(over, ast.Call) and last_name(over) == "tqdm")
    return [name_of(each) for each in target.elts] if is_plain and isinstance(target, ast.Tuple) else []


def _is_read_elsewhere(program: ProgramSyntax, loop: ast.For, place: int) -> bool:
    for function in program.functions:
        for parts in (_parts(each) for each in _data_loops(function) if each is not loop):
            if len(parts) == len(_parts(loop)) and parts[place] in function.read:
                return True
    return False


def _unread_arguments(program: ProgramSyntax, function: FunctionSyntax) -> Iterator[UnreadValue]:
    """Parameters that nothing reads, and that every call gives a number to, or what comes of the data."""
    node = function.node
    if isinstance(node, ast.Module) or function is program.loop:
        return
    for name in function.parameters:
        if name in function.read or name.startswith("_") or name in ("self", "cls", "ctx"):
            continue
        if function.is_method:
            is_given = node.name == "forward" and name not in function.defaults
        else:
            is_given = program.is_only_called(node.name) and _is_always_given(program, function, name)
        if is_given:
            yield _unread("argument", name, node, is_missed=False)


def _is_always_given(program: ProgramSyntax, function: FunctionSyntax, name: str) -> bool:
    calls = program.calls(name_of_function(function))
    given = [(owner, dict(arguments(call, function)).get(name)) for owner, call in calls]
    return bool(given) and all(_is_of_worth(owner, value) for owner, value in given)


def _is_of_worth(owner: FunctionSyntax, value: ast.expr | None) -> bool:
    """A number, or what is made of the data; a name that is handed on may be there for the form."""
    is_number = isinstance(value, ast.Constant) and isinstance(value.value, int | float)
    return is_number or bool(names_read(value) & (owner.of_data - set(owner.parameters)))


def _unread_settings(program: ProgramSyntax, function: FunctionSyntax) -> Iterator[UnreadValue]:
    """Parameters of the function with the loop that have a number as their default: nobody else gives it its form."""
    if function is not program.loop or function.parameters[:1] in (["self"], ["cls"]):
        return
    for name, value in function.defaults.items():
        is_number = isinstance(value, ast.Constant) and type(value.value) in (int, float)
        if is_number and name not in function.read and not name.startswith("_"):
            yield _unread("setting", name, value, is_missed=not _is_for_the_form(program, function, name))


def _is_for_the_form(program: ProgramSyntax, function: FunctionSyntax, name: str) -> bool:
    """Whether another function takes the same, or this one is handed on: both may be called in one way."""
    others = [
        each for each in ast.walk(program.tree) if isinstance(each, ast.FunctionDef) and each is not function.node
    ]
    taken = {each.arg for other in others for each in (*other.args.args, *other.args.kwonlyargs)}
    return name in taken or not program.is_only_called(name_of_function(function))


def _unread_outcomes(program: ProgramSyntax, function: FunctionSyntax) -> Iterator[UnreadValue]:
    """What ``state, reward, done, info = environment.step(action)`` says of reward and end."""
    for statement in function.statements:
        names = _outcomes(statement)
        for place, name in [*enumerate(names)][1:3]:
            if name.isidentifier() and not name.startswith("_") and name not in function.read:
                others = [
                    (each, _outcomes(s)) for each in program.functions for s in each.statements if s is not statement
                ]
                is_missed = any(len(o) == len(names) and o[place] in each.read for each, o in others)
                yield _unread("outcome", name, statement, is_missed=is_missed)


def _outcomes(statement: ast.stmt) -> list[str]:
    """The names that a step of an environment sets."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    names = list(map(name_of, targets_of(statement)))
    is_step = isinstance(value, ast.Call) and last_name(value) == "step" and bool(value.args)
    return names if is_step and len(names) in OUTCOMES else []


def _unread(kind: str, name: str, statement: ast.stmt | ast.expr, *, is_missed: bool = True) -> UnreadValue:
    return UnreadValue(kind=kind, name=name, line=statement.lineno, is_missed=is_missed)
