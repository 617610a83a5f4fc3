"""Reads the lines of the user's code that a run names, such as ``train.py:44``.

A log contains the name of a file without its folder, so the file is searched below a folder that the user passes. Only
Python files are read and links are not followed, so an untrusted log cannot expose other files.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainwright.runs.files import UnreadableFile, read_text
from trainwright.runs.printing import printable
from trainwright.runs.secrets import masked_code

LINES_AROUND = 6
MAX_EXCERPT_CHARS = 1200
"""Default limit of an excerpt, about 300 tokens."""
MAX_LINE_CHARS = 200
NUMBER_CHARS = 12
"""Characters of each line of an excerpt in JSON besides its text: the line number, the mark and the quotes."""
MAX_NAMES = 20
CHANGED = "the file was changed after the run began, so the lines may differ"
MAX_ENTRIES_SEARCHED = 20_000
"""Maximum number of files and folders that are searched. Limits the time if the folder is a home folder."""
_SOURCE = re.compile(r"([\w.+ -]{1,200}\.py):(\d{1,7})")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "node_modules", "__pycache__", "checkpoints", "bundles"}


@dataclass(frozen=True)
class Excerpt:
    """Some lines of a file, without secrets. ``file`` is its path, relative to the folder in which it was found.

    ``marked`` are the numbers of the lines that the run names. ``note`` states why there are no lines, or why they may
    differ from those of the run.
    """

    file: str
    first_line: int = 0
    lines: tuple[str, ...] = ()
    marked: tuple[int, ...] = ()
    note: str = ""

    def shows(self, source: str) -> bool:
        return source in {f"{Path(self.file).name}:{number}" for number in self.marked}

    def numbered(self) -> list[str]:
        """Return the lines with their numbers; ``>`` marks those that the run names."""
        numbers = range(self.first_line, self.first_line + len(self.lines))
        width = len(str(self.first_line + len(self.lines)))
        return [f"{'>' if n in self.marked else ' '} {n:{width}}  {line}" for n, line in zip(numbers, self.lines)]


def excerpt_of(
    sources: Sequence[str], root: Path, *, began_s: float | None = None, max_chars: int = MAX_EXCERPT_CHARS
) -> Excerpt | None:
    """Return the lines around the ``sources`` that are in the same file as the first one.

    Args:
        sources: Lines such as ``train.py:44``, the most important first.
        root: The folder below which the file is searched.
        began_s: The Unix time at which the run began. A later change of the file is noted.
        max_chars: The limit of the excerpt, which has the other lines and the enclosing function if they fit.

    Returns:
        The excerpt, with a note instead of lines if the file is missing, ambiguous, unreadable or too short. None if no
        source is a line of a Python file.
    """
    found = [match for each in sources if (match := _SOURCE.fullmatch(each))]
    if not found:
        return None
    name = found[0][1]
    numbers = sorted({int(each[2]) for each in found if each[1] == name})
    first = int(found[0][2])
    files = list(_find_files(name, root))
    if len(files) != 1:
        where = f"{len(files)} files below {root} have this name" if files else f"no file below {root} has this name"
        return Excerpt(name, note=f"{where}: give the folder of the code with --code")
    path = files[0]
    try:
        text = read_text(path).splitlines()
    except UnreadableFile as error:
        return Excerpt(str(path.relative_to(root)), note=f"it cannot be read: {error.reason}")
    if not 0 < first <= len(text):
        return Excerpt(
            str(path.relative_to(root)), note=f"it has only {len(text)} lines, so it is not the file of the run"
        )
    near = [each for each in numbers if 0 < each <= len(text)]
    begin, end = _window(text, first, near, max_chars)
    lines = masked_code("\n".join(text[begin - 1 : end])).splitlines()
    return Excerpt(
        str(path.relative_to(root)),
        begin,
        tuple(printable(each)[:MAX_LINE_CHARS] for each in lines),
        tuple(each for each in near if begin <= each <= end),
        CHANGED if _is_newer(path, began_s) else "",
    )


def _window(text: Sequence[str], first: int, near: Sequence[int], max_chars: int) -> tuple[int, int]:
    """Return the numbers of the first and the last line of an excerpt around the line ``first``.

    The excerpt has the enclosing function, the lines ``near``, and the outer functions and classes if they fit. Then it
    grows up to ``max_chars``.
    """
    costs = [min(len(each), MAX_LINE_CHARS) + NUMBER_CHARS for each in text]

    def grown(low: int, high: int) -> tuple[int, int]:
        wider = max(1, min(begin, low)), min(len(text), max(end, high))
        return wider if sum(costs[wider[0] - 1 : wider[1]]) <= max_chars else (begin, end)

    begin = end = first
    enclosing = _enclosing(_parsed("\n".join(text)), first)
    around = [(first - LINES_AROUND, first + LINES_AROUND), (near[0] - LINES_AROUND, near[-1] + LINES_AROUND)]
    for wanted in (*enclosing[:1], *around, *enclosing[1:]):
        begin, end = grown(*wanted)
    before = None
    while (begin, end) != before:
        before = begin, end
        begin, end = grown(begin - 1, end)
        begin, end = grown(begin, end + 1)
    return begin, end


def _parsed(text: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it is not Python of this version."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def _enclosing(tree: ast.Module, line: int) -> list[tuple[int, int]]:
    """Return the first and last lines of the functions and classes around a line, the innermost first."""
    spans = [
        (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return sorted((each for each in spans if each[0] <= line <= each[1]), key=lambda each: each[1] - each[0])


@dataclass(frozen=True)
class Construction:
    """The statement that makes an object: the variable, the call (without secrets) and its line."""

    variable: str
    call: str
    line: str
    note: str = ""

    @property
    def kind(self) -> str:
        """The class that is called; "" if the name is not that of a class."""
        name = self.call.partition("(")[0].rpartition(".")[2]
        return name if name[:1].isupper() else ""


def construction_of(source: str, root: Path, *, began_s: float | None = None) -> Construction | None:
    """Return the statement that makes the optimizer whose ``step`` or ``zero_grad`` is called on the line ``source``.

    It is the only statement of the file that assigns a call to the optimizer's variable; if that calls a function of
    the file, the call that this function returns. None if there is not exactly one. See ``excerpt_of`` for the others.
    """
    match = _SOURCE.fullmatch(source)
    files = list(_find_files(match[1], root)) if match else []
    if match is None or len(files) != 1:
        return None
    try:
        nodes = list(ast.walk(_parsed(read_text(files[0]))))
    except UnreadableFile:
        return None
    called = [node for node in nodes if isinstance(node, ast.Call) and node.lineno == int(match[2])]
    methods = [(each.args, each.func) for each in called if isinstance(each.func, ast.Attribute)]
    variables = [
        ast.unparse(each)
        for args, func in methods
        if func.attr in ("step", "zero_grad")
        for each in (*args, func.value)  # in scaler.step(optimizer), the argument comes first
    ]
    for variable in variables:
        made = [node.value for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign) and _sets(node, variable)]
        calls = [each for each in made if isinstance(each, ast.Call)]
        if len(calls) == 1:
            call = _returned(calls[0], nodes)
            text = masked_code(ast.unparse(call))[:MAX_LINE_CHARS]
            note = CHANGED if _is_newer(files[0], began_s) else ""
            return Construction(variable, text, f"{match[1]}:{call.lineno}", note)
    return None


def _sets(node: ast.Assign | ast.AnnAssign, variable: str) -> bool:
    return variable in map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])


def _returned(call: ast.Call, nodes: Sequence[ast.AST]) -> ast.Call:
    """Return the only call that a function of the file returns; ``call`` itself if it calls something else."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == ast.unparse(call.func)]
    returns = [each.value for node in functions for each in ast.walk(node) if isinstance(each, ast.Return)]
    calls = [each for each in returns if isinstance(each, ast.Call)]
    return calls[0] if len(functions) == len(calls) == 1 else call


def _is_newer(path: Path, began_s: float | None) -> bool:
    return began_s is not None and path.stat().st_mtime > began_s


def source_names(root: Path, name: str = "") -> list[str]:
    """Return the names of the first Python files below ``root``, or of those called ``name`` if it is given."""
    return sorted({path.name for path in islice(_find_files(name, root), MAX_NAMES) if path.suffix == ".py"})


def _find_files(name: str, root: Path) -> Iterator[Path]:
    """Yield the regular files with this name below ``root``; with "" all Python files.

    Skips runs, hidden folders and installed packages.
    """
    seen = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(each for each in folders if not _is_skipped(Path(folder) / each))
        seen += len(files) + len(folders)
        for each in sorted(files):
            path = Path(folder) / each
            is_wanted = each == name if name else each.endswith(".py")
            if is_wanted and path.is_file() and not path.is_symlink():
                yield path
        if seen > MAX_ENTRIES_SEARCHED:
            return


def _is_skipped(folder: Path) -> bool:
    is_run = (folder / "log.jsonl").exists()  # files of a run are not the user's code
    is_skipped = folder.name.startswith(".") or folder.name in _SKIPPED_FOLDERS or is_run
    return is_skipped or (folder / "pyvenv.cfg").exists()
