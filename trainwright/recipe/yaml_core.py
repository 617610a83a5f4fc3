"""Reads YAML text as plain values, each with its line, and writes YAML.

PyYAML reads YAML 1.1, where ``1e-3`` is a string, ``no`` is false, ``010`` is eight and ``12:30`` is 750.
Only its parser is used here. Scalars follow the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trainwright.errors import Problem
from trainwright.recipe.formatting import LARGEST_INT, format_value, readable
from trainwright.recipe.source import Place, join_path
from trainwright.runs.secrets import masked

MAX_NODES = 10_000  # counted after aliases are expanded, against the "billion laughs"
MAX_DEPTH = 100

_TAG = "tag:yaml.org,2002:"
_CORE = (
    ("null", re.compile(r"~|null|Null|NULL|")),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
    ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")),
    ("float", re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")),
    ("merge", re.compile(r"<<")),
)
_KNOWN_TAGS = {_TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}

# A piece of PyYAML's message -> remedy. The first match applies.
_REMEDIES = (
    (r"'\\t'|tab", "indent with spaces; a tab is not allowed there"),
    (
        "mapping values are not allowed",
        "check the indentation, and put quotes around a value that contains ': '",
    ),
    ("could not find expected ':'", "write key: value, with a space after the colon"),
    ("expected ',' or", "close the bracket, and separate items with commas"),
    ("end of stream|quoted scalar", "close the quotes or the bracket"),
    ("cannot start any token", "put quotes around a value that begins with a special character"),
    ("expected <block end>", "check the indentation: keys of one mapping begin in the same column"),
    ("undefined alias", "put quotes around a value that begins with *, or define the anchor above it"),
    ("single document", "keep one recipe per file: remove the line ---"),
    ("special characters", "remove the control character"),
)


@dataclass
class Document:
    """The content of a YAML text. ``unreadable`` holds the paths whose value could not be read."""

    name: str
    value: object = None
    places: dict[str, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)


class UnreadableError(Exception):
    """The complete text cannot be read, for the reason in ``problem``."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def core_tag(text: str) -> str:
    """Return the tag that YAML 1.2 gives to a plain scalar."""
    for name, pattern in _CORE:
        if pattern.fullmatch(text):
            return _TAG + name
    return _TAG + "str"


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.document_name = name
        self.count = self.depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Check number and depth of nodes while parsing: a hostile text could take minutes, or overflow the stack."""
        self.count += 1
        self.depth += 1
        if self.count > MAX_NODES:
            raise UnreadableError(_too_many("", str(Place(self.document_name, self.line + 1))))
        if self.depth > MAX_DEPTH:
            raise UnreadableError(_too_deep(str(Place(self.document_name, self.line + 1))))
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def resolve(self, kind: type[Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        if kind is ScalarNode and implicit[0]:
            return core_tag(value or "")
        return _TAG + {ScalarNode: "str", SequenceNode: "seq", MappingNode: "map"}[kind]


class _Dumper(yaml.SafeDumper):
    def resolve(self, kind: type[Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        # Text that YAML 1.1 or 1.2 reads as something else gets quotes.
        tag = core_tag(value or "") if kind is ScalarNode and implicit[0] else _TAG + "str"
        return tag if tag != _TAG + "str" else str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]

    def ignore_aliases(self, _data: object) -> bool:
        return True


class _PlainDumper(_Dumper):
    def represent_str(self, text: str) -> ScalarNode:
        return self.represent_scalar(_TAG + "str", text, style="|" if "\n" in text else None)


_PlainDumper.add_representer(str, _PlainDumper.represent_str)


def write(value: object) -> str:
    """Return block-style YAML that `read`, and any reader of YAML 1.1 or 1.2, reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def write_all(values: Sequence[object]) -> str:
    """Return several documents in one file; texts of several lines are written as block scalars."""
    return yaml.dump_all(values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=110)


def read(text: str, name: str) -> Document:
    """Parse one document; ``name`` is the file name for messages.

    Raises UnreadableError for text that is not YAML; smaller faults (a duplicate key, a custom tag) are collected in
    ``Document.problems``.
    """
    try:
        node = _Loader(text, name).get_single_node()
        document = Document(name)
        if node is not None:
            document.places[""] = Place(name, _line(node))
            document.value = _Values(document).value(node, "", 0)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: "\\UFFFFFFFF" is not a character
        raise UnreadableError(_syntax_problem(error, name, text)) from None
    return document


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _too_many(path: str, where: str) -> Problem:
    rule = f"must not hold more than {MAX_NODES} keys and values, aliases expanded"
    return Problem(path, rule, remedy="use fewer aliases, and put long lists into a file", where=where)


def _too_deep(where: str) -> Problem:
    return Problem("", f"must not nest deeper than {MAX_DEPTH} levels", remedy="flatten it", where=where)


def _syntax_problem(error: Exception, name: str, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
    message = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    context = str(getattr(error, "context", None) or "")
    got = text.splitlines()[line - 1].strip() if 0 < line <= len(text.splitlines()) else ""
    fitting = [remedy for piece, remedy in _REMEDIES if re.search(piece, message) or re.search(piece, context)]
    remedy = fitting[0] if fitting else "check how this line and the one above it are written"
    rule = f"is not YAML: {', '.join(part for part in (context, message) if part)}"
    return Problem("", readable(rule), got=format_value(masked(got)), remedy=remedy, where=str(Place(name, line)))


class _Values:
    """Converts nodes to plain values in one walk; every alias is expanded into separate values."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0

    def value(self, node: Node, path: str, depth: int) -> object:
        self.count += 1
        if self.count > MAX_NODES:
            raise UnreadableError(_too_many(path, self._where(node)))
        if depth > MAX_DEPTH:  # recursive aliases end here, too
            raise UnreadableError(_too_deep(self._where(node)))
        if node.tag not in _KNOWN_TAGS:
            self.document.unreadable.add(path)
            self._problem(node, path, "custom tags are not allowed", node.tag, "remove the tag (the word after '!')")
        if isinstance(node, MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode):
            return self._sequence(node, path, depth)
        return self._scalar(node, path)

    def _sequence(self, node: SequenceNode, path: str, depth: int) -> list[object]:
        values = []
        for index, item in enumerate(node.value):
            here = join_path(path, str(index))
            self.document.places[here] = Place(self.document.name, _line(item))
            values.append(self.value(item, here, depth + 1))
        return values

    def _mapping(self, node: MappingNode, path: str, depth: int) -> dict[str, object]:
        values = self._merge(node, path, depth)
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = self._key(key_node, path)
            here, line = join_path(path, key), _line(key_node)
            if key in first_lines:
                rule = f"is written twice: here and at {Place(self.document.name, first_lines[key])}"
                self._problem(key_node, here, rule, "", "keep one of the two")
            first_lines.setdefault(key, line)
            self.document.places[here] = Place(self.document.name, line)
            values[key] = self.value(value_node, here, depth + 1)
        return values

    def _merge(self, node: MappingNode, path: str, depth: int) -> dict[str, object]:
        """Return the keys that ``<<: *base`` or ``<<: [*a, *b]`` adds.

        If several mappings have a key, the first mapping wins; the node's own keys win over all of them.
        """
        merged = [value_node for key_node, value_node in node.value if key_node.tag == _TAG + "merge"]
        bases = [base for item in merged for base in (item.value if isinstance(item, SequenceNode) else [item])]
        values: dict[str, object] = {}
        for base in reversed(bases):
            value = self.value(base, path, depth + 1)
            if isinstance(value, dict):
                values.update(value)
            else:
                rule = "only a mapping can be merged with <<"
                self._problem(base, path, rule, format_value(value), "write <<: *name, the anchor of a mapping")
        return values

    def _key(self, node: Node, path: str) -> str:
        if isinstance(node, ScalarNode):
            text = readable(str(node.value))
            key = self._scalar(node, join_path(path, text))
            if not isinstance(key, str):
                self._unreadable(node, join_path(path, text), "keys must be text", f"put quotes around it: '{text}'")
            return text
        self._problem(node, path, "a key must be text, not a list or a mapping", "", "write a plain word as key")
        return f"<line {_line(node)}>"

    def _scalar(self, node: Node, path: str) -> object:
        tag, text = node.tag.removeprefix(_TAG), str(node.value)
        if tag not in ("null", "bool", "int", "float"):
            if readable(text) != text:
                self._unreadable(node, path, "must be valid Unicode text", "write the character itself")
            return readable(text)
        if core_tag(text) != node.tag and not (tag == "float" and core_tag(text) == _TAG + "int"):
            self._unreadable(node, path, f"cannot be read as !!{tag}", "remove the tag")
            return text
        if tag == "int":
            return self._int(node, path, text)
        if tag == "null":
            return None
        return text.lower() == "true" if tag == "bool" else _float(text)

    def _int(self, node: Node, path: str, text: str) -> int:
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        # Python refuses to convert thousands of digits (a ValueError); nothing here needs more than 64 bits.
        value = int(text, base) if len(text) <= 100 else LARGEST_INT + 1
        if abs(value) > LARGEST_INT:
            self._unreadable(node, path, "must fit into 64 bits", "write it as a float, e.g. 1e30, if that is meant")
        return value

    def _where(self, node: Node) -> str:
        return str(Place(self.document.name, _line(node)))

    def _problem(self, node: Node, path: str, rule: str, got: str, remedy: str) -> None:
        self.document.problems.append(Problem(path, rule, got=got, remedy=remedy, where=self._where(node)))

    def _unreadable(self, node: Node, path: str, rule: str, remedy: str) -> None:
        self.document.unreadable.add(path)
        self._problem(node, path, rule, format_value(str(node.value)), remedy)


def _float(text: str) -> float:
    return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
