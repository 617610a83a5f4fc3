"""The base of every section of a recipe, and the types of fields that several sections share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.recipe.catalog import Row
from trainwright.recipe.duration import Duration, DurationField
from trainwright.recipe.formatting import LARGEST_INT, format_value, readable

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


MAX_DEPTH = 50
MAX_VALUES = 10_000  # the same limit as for the nodes of a YAML file

_ONLY = "may hold text, numbers, true, false, null, lists and mappings with text keys only"


class _Copy:
    """Copies ``args`` and collects every problem, with paths relative to ``args``."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.count = 0

    def copy(self, value: object, path: tuple[str, ...]) -> object:
        self.count += 1
        if self.count > MAX_VALUES:
            return None
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, float)):
            return self._number(value, path)
        if isinstance(value, str):
            return self._encodable(value, path)
        if isinstance(value, (dict, list, tuple)):
            return self._container(value, path)
        self._wrong(path, _ONLY, type(value).__name__, "give the name of the thing and look it up in your code")
        return None

    def _container(self, value: Mapping[object, object] | Sequence[object], path: tuple[str, ...]) -> object:
        if len(path) > MAX_DEPTH:
            self._wrong(path[:3], f"may nest at most {MAX_DEPTH} levels deep", "", "flatten it")
            return None
        if not isinstance(value, Mapping):
            return [self.copy(item, (*path, str(index))) for index, item in enumerate(value)]
        result: dict[str, object] = {}
        for key, item in value.items():
            if isinstance(key, str):
                result[str(self._encodable(key, path))] = self.copy(item, (*path, key))
            else:
                self._wrong(
                    path, "keys must be text", format_value(key), f"put quotes around it: '{format_value(key)}'"
                )
        return result

    def _number(self, value: float, path: tuple[str, ...]) -> float | None:
        if isinstance(value, int):
            if abs(value) > LARGEST_INT:
                self._wrong(path, "must fit into 64 bits", format_value(value), "write it as a float, e.g. 1e30")
                return None
            return int(value)
        if math.isnan(value):
            self._wrong(path, "must not be NaN", ".nan", "write a number, or null for none")
            return None
        return float(value)

    def _encodable(self, text: str, path: tuple[str, ...]) -> str | None:
        if readable(text) != text:
            self._wrong(path, "must be valid Unicode text", format_value(text), "write the character itself")
            return None
        return str(text)

    def _wrong(self, path: tuple[str, ...], rule: str, got: str, remedy: str) -> None:
        self.problems.append(Problem(readable(".".join(path)), rule, got=got, remedy=remedy))


def _plain(value: object) -> object:
    """Return a deep copy of ``args`` with lists for tuples. Raises RecipeError (paths relative to ``args``)."""
    if not isinstance(value, dict):
        return value  # pydantic reports it
    copying = _Copy()
    result = copying.copy(value, ())
    if copying.count > MAX_VALUES:
        raise RecipeError(Problem("", f"may hold at most {MAX_VALUES} values", remedy="put them into a file"))
    if copying.problems:
        raise RecipeError(copying.problems)
    return result


def _require_time(value: Duration) -> Duration:
    if value.unit != "s":
        raise UsageError("must be a wall-clock time", remedy="write for example 15min")
    return value


Args = Annotated[dict[str, Any], BeforeValidator(_plain)]

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
ClockTime = Annotated[Duration, AfterValidator(_require_time)]


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
        row = cls._rows().get(use) if isinstance(use, str) else None
        return () if row is None else tuple(key for key in row.keys if key not in cls.model_fields)

    @classmethod
    def _rows(cls) -> Mapping[str, Row]:
        names = next(each.names for each in cls.model_fields["use"].metadata if isinstance(each, ShortName))
        return names if isinstance(names, Mapping) else {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(core_schema))
        for key in dict.fromkeys(key for row in cls._rows().values() for key in row.keys):
            mapping["properties"].setdefault(key, {"description": f"The same as args.{key}."})
        return {"anyOf": [mapping["properties"]["use"], mapping], "description": mapping.get("description", "")}
