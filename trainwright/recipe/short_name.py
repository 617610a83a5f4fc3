"""The type of ``use:`` and the like: a name from the catalog, or ``package.module:callable``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from trainwright.errors import UsageError
from trainwright.recipe.catalog import Row
from trainwright.recipe.formatting import readable

_DOTTED = "package.module:callable"


@dataclass(frozen=True, eq=False)
class ShortName:
    """Annotates a ``str`` that is one of ``names``, which are read at each check. ``kind`` is for messages.

    ``accepts_references``: ``package.module:callable`` may be named instead.
    """

    kind: str
    names: Mapping[str, Row] | Collection[str]
    accepts_references: bool = True

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = {"type": "string", "pattern": "^[^\\s:]+:[^\\s:]+$"}
        listed: JsonSchemaValue = {"enum": list(self.names)}
        if isinstance(self.names, Mapping):  # VS Code shows these beside the values
            listed["enumDescriptions"] = [row.doc for row in self.names.values()]
        if not self.accepts_references:
            return listed
        return {"anyOf": [listed, reference]} if self.names else reference

    def check(self, text: str) -> str:
        """Return ``text`` if it is one of the names or a reference. Raises UsageError with a remedy."""
        if text in self.names or (self.accepts_references and is_reference(text)):
            return text
        raise UsageError(f"must be {self._rule()}", remedy=self._remedy(text))

    def _rule(self) -> str:
        listed = ", ".join(self.names)
        if not self.accepts_references:
            return f"one of {listed}"
        return f"a known {self.kind} ({listed}) or {_DOTTED}" if self.names else _DOTTED

    def _remedy(self, text: str) -> str:
        module, colon, name = text.partition(":")
        if colon and module.endswith(".py"):
            module = module.removesuffix(".py").replace("/", ".").strip(".")
            return f"write the module as it is imported: {readable(module)}:{readable(name)}"
        close = difflib.get_close_matches(text[:100].lower().replace("-", "_"), self.names, n=1)
        if close and not colon:
            return f"did you mean {close[0]}?"
        module, dot, name = text.rpartition(".")
        if self.accepts_references and dot and not colon and is_reference(f"{module}:{name}"):
            return f"did you mean {module}:{name}? (a colon before the callable)"
        return f"write one of {', '.join(self.names)}" if self.names else f"write {_DOTTED}"


def is_reference(text: str) -> bool:
    """Return True if ``text`` has the form ``package.module:callable`` (``Class.method`` counts as a callable)."""
    module, colon, name = text.partition(":")
    dotted = [*module.split("."), *name.split(".")]
    return bool(colon) and not module.endswith(".py") and all(part.isidentifier() for part in dotted)
