"""The type of ``use:``: a short name of its kind, or ``package.module:callable``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from trainwright.errors import UsageError
from trainwright.recipe.showing import readable

_DOTTED = "package.module:callable"


@dataclass(frozen=True)
class ShortName:
    """Annotates a ``str``. ``kind`` is for messages, ``names`` are the short names."""

    kind: str
    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = {"type": "string", "pattern": "^[^\\s:]+:[^\\s:]+$"}
        return {"anyOf": [{"enum": list(self.names)}, reference]} if self.names else reference

    def checked(self, text: str) -> str:
        """``text`` if it is one of the names or a reference; raises UsageError with a remedy."""
        if text in self.names or is_reference(text):
            return text
        known = f"a known {self.kind} ({', '.join(self.names)}) or {_DOTTED}" if self.names else _DOTTED
        raise UsageError(f"must be {known}", remedy=self._remedy(text))

    def _remedy(self, text: str) -> str:
        module, colon, name = text.partition(":")
        if colon and module.endswith(".py"):
            module = module.removesuffix(".py").replace("/", ".").strip(".")
            return f"write the module as it is imported: {readable(module)}:{readable(name)}"
        close = difflib.get_close_matches(text[:100].lower().replace("-", "_"), self.names, n=1, cutoff=0.55)
        if close and not colon:
            return f"did you mean {close[0]}?"
        module, dot, name = text.rpartition(".")
        if dot and not colon and is_reference(f"{module}:{name}"):
            return f"did you mean {module}:{name}? (a colon before the callable)"
        return f"write one of {', '.join(self.names)}" if self.names else f"write {_DOTTED}"


def is_reference(text: str) -> bool:
    """Whether ``text`` has the form ``package.module:callable`` (``Class.method`` counts as a callable)."""
    module, colon, name = text.partition(":")
    dotted = [*module.split("."), *name.split(".")]
    return bool(colon) and not module.endswith(".py") and all(part.isidentifier() for part in dotted)
