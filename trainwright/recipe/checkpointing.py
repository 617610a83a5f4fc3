"""The type of ``model.activation_checkpointing``: a name, or a limit on the memory of a step."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from trainwright.errors import UsageError
from trainwright.recipe.byte_size import parse_bytes

NAMES = ("none", "block", "selective", "auto")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Annotates a ``str``: one of ``NAMES``, or the peak memory of a step, such as ``12GiB``."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        budget = {"type": "string", "pattern": "^[0-9.]+ ?[KMGTkmgt]?i?[Bb]$", "examples": ["12GiB"]}
        return {"anyOf": [{"enum": list(NAMES)}, budget]}

    def check(self, text: str) -> str:
        """Return ``text``. Raises UsageError with a remedy."""
        if text in NAMES:
            return text
        if not any(each.isdigit() for each in text):
            close = get_close_matches(text[:100].lower(), NAMES, n=1, cutoff=0.5)
            remedy = f"did you mean {close[0]}?" if close else "block checkpoints each block"
            raise UsageError(f"must be one of {', '.join(NAMES)}, or a peak such as 12GiB", remedy=remedy)
        parse_bytes(text)
        return text
