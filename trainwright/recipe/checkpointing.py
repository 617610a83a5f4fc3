"""What a recipe may say of activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from trainwright.errors import UsageError
from trainwright.recipe.byte_size import parse_bytes

NAMES = ("none", "block", "selective", "auto")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Annotates a ``str``: one of ``NAMES``, or the memory that a step may take at its peak."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        budget = {"type": "string", "pattern": "^[0-9.]+ ?[KMGTkmgt]?i?[Bb]$", "examples": ["12GiB"]}
        return {"anyOf": [{"enum": list(NAMES)}, budget]}

    def checked(self, text: str) -> str:
        """``text`` itself; raises UsageError with a remedy."""
        if text in NAMES:
            return text
        if not any(each.isdigit() for each in text):
            close = get_close_matches(text[:100].lower(), NAMES, n=1, cutoff=0.5)
            remedy = f"did you mean {close[0]}?" if close else "block computes each block again"
            raise UsageError(f"must be one of {', '.join(NAMES)}, or a peak such as 12GiB", remedy=remedy)
        parse_bytes(text)
        return text
