"""The base of every section of a recipe, and the types of fields that several sections share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.recipe.arguments import Args
from trainwright.recipe.duration import Duration, DurationField
from trainwright.recipe.formatting import LARGEST_INT
from trainwright.recipe.short_name import ShortName

Count = Annotated[int, Field(gt=0, le=LARGEST_INT)]
SampleId = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # not strict: YAML has lists and no tuples
TextOrTexts = Annotated[
    Texts,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}),
]
"""A list of texts; a single text is short for a list with one item."""
Warmup = Annotated[Duration, DurationField(allow_zero=True)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion (``"8"`` is not ``8``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Part(Section):
    """An object built by calling a factory. The bare name ``gpt`` is short for ``{use: gpt}``."""

    use: Annotated[str, ShortName("part", {})] = Field(description="A short name, or package.module:callable.")
    args: Args = Field(default_factory=dict, description="Keyword arguments of the callable that `use` names.")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: object) -> object:
        """Accept a bare name, and the arguments of a catalog row that may be written beside ``use``."""
        if isinstance(value, str):
            return {"use": value}
        args = value.get("args", {}) if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(args, dict):
            return value  # pydantic reports it
        beside = [key for key in cls._keys_beside(value.get("use")) if key in value]
        for key in beside:
            if key in args:
                rule, remedy = "is also in args", f"keep {key} in one place"
                raise RecipeError(Problem(str(key), rule, remedy=remedy))
        rest = {key: each for key, each in value.items() if key not in beside}
        return {**rest, "args": {**{key: value[key] for key in beside}, **args}} if beside else value

    @classmethod
    def _keys_beside(cls, use: object) -> tuple[str, ...]:
        """Return the arguments of a row that a recipe may write beside ``use``."""
        names = next(each.names for each in cls.model_fields["use"].metadata if isinstance(each, ShortName))
        row = names.get(use) if isinstance(names, Mapping) and isinstance(use, str) else None
        return () if row is None else tuple(key for key in row.keys if key not in cls.model_fields)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(core_schema))
        names = next(each.names for each in cls.model_fields["use"].metadata if isinstance(each, ShortName))
        rows = names.values() if isinstance(names, Mapping) else ()
        for key in dict.fromkeys(key for row in rows for key in row.keys):
            mapping["properties"].setdefault(key, {"description": f"The same as args.{key}."})
        return {
            "anyOf": [mapping["properties"]["use"], mapping],
            "description": mapping.get("description", ""),
        }


def require_time(value: Duration | None) -> Duration | None:
    """Return ``value``. Raises UsageError for a duration that is not a time."""
    if value is not None and value.unit != "s":
        raise UsageError("must be a wall-clock time", remedy="write for example 15min")
    return value
