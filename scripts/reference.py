"""Prints docs/reference/api.md from the schema of recipes and from docstrings: ``python scripts/reference.py``."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

import trainwright as tw
from trainwright import recipe

Schema = Mapping[str, Any]

HEAD = """# Python API and recipe keys

Every key of a recipe, from its schema, and every public name of `trainwright`, from its docstring.
`scripts/reference.py` prints this page, and a test holds it equal.

# Keys of a recipe

A length is a number with a unit: `1000steps`, `2ep`, `90min`, `5Mtok`, `50000samples` or `0.1run`. A list in a path is
shown by `[]`. The same keys are set in `tw.fit` by `settings={"optimizer.clip.at": 0.5}`, and on the command line by
`--set optimizer.clip.at=0.5`. What a recipe names as `package.module:callable` is imported and called: a recipe is
code, see [SECURITY.md](../../SECURITY.md).
"""


def rows(schema: Schema, path: str, defs: Mapping[str, Schema]) -> Iterator[tuple[str, str, str, str]]:
    """Yields path, values, default and description of each key below ``path``."""
    for key, value in schema.get("properties", {}).items():
        inner, in_list = _section(value, defs)
        where = f"{path}.{key}" if path else key
        if inner is None:
            yield where, values(value, defs), _default(value, key in schema.get("required", ())), _words(value)
            continue
        if in_list or value.get("description"):
            yield f"{where}[]" if in_list else where, "a list of" if in_list else "a section", "", _words(value)
        yield from rows(inner, f"{where}[]" if in_list else where, defs)


def _section(value: Schema, defs: Mapping[str, Schema]) -> tuple[Schema | None, bool]:
    """Returns the schema of the section in a key (None if it holds a value), and whether it is a list of sections."""
    in_list = value.get("type") == "array"
    found = value.get("items", {}) if in_list else value
    for each in (found, *found.get("anyOf", ())):
        if "$ref" in each:
            each = defs[each["$ref"].rpartition("/")[2]]
        for one in (each, *each.get("anyOf", ())):
            if "properties" in one:
                return one, in_list
    return None, in_list


def values(schema: Schema, defs: Mapping[str, Schema]) -> str:
    """Returns the permitted values of a key as text."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(filter(None, (values(each, defs) for each in schema["anyOf"]))))
    if "enum" in schema:
        return ", ".join(f"`{str(each).lower() if isinstance(each, bool) else each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const']).strip(chr(34))}`"
    if "pattern" in schema:
        return "a length" if "steps" in str(schema.get("examples", schema["pattern"])) else _form(schema)
    kind = schema.get("type", "")
    if kind == "array":
        return f"a list of {values(schema.get('items', {}), defs) or 'values'}"
    return {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": ""}.get(
        kind, "a mapping" if kind == "object" else "any value"
    )


def _form(schema: Schema) -> str:
    return "`package.module:callable`" if ":" in schema["pattern"] else "text"


def _default(schema: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    default = schema.get("default")
    return "" if default is None else f"`{json.dumps(default).strip(chr(34))}`"


def _words(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split()).replace("|", "\\|")


def keys() -> str:
    schema = recipe.json_schema()
    lines = ["| key | value | default | what it is |", "|---|---|---|---|"]
    lines += [f"| `{path}` | {kind} | {default} | {words} |" for path, kind, default, words in _all(schema)]
    return "\n".join(lines)


def _all(schema: Schema) -> Iterator[tuple[str, str, str, str]]:
    return rows(schema, "", schema["$defs"])


def names() -> Iterator[str]:
    """Yields a section for each public name."""
    for name in sorted(set(tw.__all__) - {"__version__"}, key=str.lower):
        found = getattr(importlib.import_module(tw._HOME[name]), name)  # not from tw: a subpackage may have the name
        yield f"## tw.{name}\n\n```\n{name}{_signature(found)}\n```\n\n{_text(inspect.getdoc(found) or '')}"


def _signature(found: object) -> str:
    """Returns the parameters, one per line if they are too long for one; annotations as in the source."""
    if not callable(found) or (isinstance(found, type) and issubclass(found, BaseModel)):
        return ""
    try:
        every = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # a protocol, or an alias
        return ""
    parameters = [_parameter(each) for each in every]
    by_name = next((n for n, each in enumerate(every) if each.kind is each.KEYWORD_ONLY), None)
    if by_name is not None and not any(each.kind is each.VAR_POSITIONAL for each in every):
        parameters.insert(by_name, "*")
    inline = f"({', '.join(parameters)})"
    return inline if len(inline) < 100 else "(\n" + "".join(f"    {each},\n" for each in parameters) + ")"


def _parameter(each: inspect.Parameter) -> str:
    """Returns a parameter as in the source. ``str(each)`` would quote annotations, which are strings."""
    kind = "" if each.annotation is each.empty else f": {each.annotation}"
    kind = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", kind)
    shown = repr(each.default) if type(each.default) in (str, int, float, bool, tuple, type(None)) else "..."
    default = "" if each.default is each.empty else f" = {shown}"
    return f"{each.replace(annotation=each.empty, default=each.empty)!s}{kind}{default}"


def _text(docstring: str) -> str:
    """Returns a docstring as Markdown. Indented lines, such as the arguments, become a list."""
    lines = []
    for line in docstring.replace("``", "`").splitlines():
        bare = line.strip()
        depth = (len(line) - len(line.lstrip())) // 4
        lines.append(f"- {bare}" if depth == 1 else f"  {bare}" if depth > 1 else line)
    return "\n".join(lines)


def page() -> str:
    return "\n\n".join([HEAD.rstrip(), keys(), "# Public names", *names()])


if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
