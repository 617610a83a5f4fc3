"""The base of every section of a recipe, and the types of fields that several sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from trainwright.errors import UsageError
from trainwright.recipe.arguments import Args
from trainwright.recipe.duration import Duration, DurationField
from trainwright.recipe.formatting import LARGEST_INT
from trainwright.recipe.short_name import ShortName

Count = Annotated[int, Field(gt=0, le=LARGEST_INT)]
SampleId = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # not strict: YAML has lists and no tuples
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
    def _bare_name(cls, value: object) -> object:
        return {"use": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(core_schema))
        return {
            "anyOf": [mapping["properties"]["use"], mapping],
            "description": mapping.get("description", ""),
        }


def require_time(value: Duration | None) -> Duration | None:
    """Return ``value``. Raises UsageError for a duration that is not a time."""
    if value is not None and value.unit != "s":
        raise UsageError("must be a wall-clock time", remedy="write for example 15min")
    return value
