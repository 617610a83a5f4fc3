"""The JSON Schema of recipes, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from trainwright.recipe.duration import Duration
from trainwright.recipe.schema import Recipe


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: object) -> object:
        return str(dft) if isinstance(dft, Duration) else super().encode_default(dft)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema, draft 2020-12, of a recipe file."""
    schema = Recipe.model_json_schema(schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_without_titles(schema)}


def _without_titles(schema: Any) -> Any:
    """Remove pydantic's titles, which only repeat the keys. A *property* called title is a mapping, not a string."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema
