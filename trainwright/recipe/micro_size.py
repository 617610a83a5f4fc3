"""The type of ``batch.micro``: a number of samples, or ``auto``, which leaves it to the plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainValidator, WithJsonSchema

from trainwright.errors import UsageError
from trainwright.recipe.formatting import LARGEST_INT


def _validate(value: object) -> object:
    if value is None or value == "auto" or (type(value) is int and 0 < value <= LARGEST_INT):
        return value
    raise UsageError("must be a whole number above 0, or auto", remedy="write for example 8, or auto")


MicroSize = Annotated[
    int | Literal["auto"] | None,
    PlainValidator(_validate),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}, {"type": "null"}]}),
]
