"""The recipe that a conversion builds, with a row for each key of the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainwright.recipe import METRICS, Recipe
from trainwright.recipe.formatting import format_value
from trainwright.runs.secrets import MASK, is_secret

KeyOutcome = Literal["taken", "no meaning", "not supported"]
INACTIVE = ("", "no", "none", "off", "None")
"""Strings that turn a feature off, as null, false, 0 and an empty list do. Such a key needs no counterpart."""


@dataclass(frozen=True)
class KeyRow:
    """The outcome of one key of the file. ``paths`` are the recipe keys that it sets."""

    key: str
    value: str
    outcome: KeyOutcome
    note: str = ""
    remedy: str = ""
    paths: tuple[str, ...] = ()


@dataclass
class Draft:
    """Collects recipe values by dotted path, rows by key, and what the user has to write."""

    settings: dict[str, object] = field(default_factory=dict)
    rows: list[KeyRow] = field(default_factory=list)
    to_fill_in: dict[str, str] = field(default_factory=dict)
    """By path: what belongs there. ``settings`` has a placeholder."""

    def take(self, key: str, value: object, settings: Mapping[str, object], note: str = "") -> None:
        """Record that the key sets these paths of the recipe."""
        self.settings |= settings
        self.rows.append(KeyRow(key, text_of(key, value), "taken", note=note, paths=tuple(settings)))

    def skip(self, key: str, value: object, why: str) -> None:
        """Record that the key needs no counterpart."""
        self.rows.append(KeyRow(key, text_of(key, value), "no meaning", note=why))

    def refuse(self, key: str, value: object, why: str, remedy: str) -> None:
        """Record that the key has no counterpart, although it would change the run."""
        self.rows.append(KeyRow(key, text_of(key, value), "not supported", note=why, remedy=remedy))

    def leave_open(self, path: str, placeholder: object, what: str) -> None:
        """Add a placeholder for a value that the file cannot define, unless a key has set it."""
        if path not in self.settings:
            self.settings[path] = placeholder
            self.to_fill_in[path] = what

    def withdraw(self, path: str, why: str, remedy: str) -> bool:
        """Remove the value of this path, or of a part of it, because the schema refuses it. Returns False if none was
        set.
        """
        for index, row in reversed([*enumerate(self.rows)]):  # the last one that set it counts
            at_fault = [each for each in row.paths if f"{path}.".startswith(f"{each}.") or each.startswith(f"{path}.")]
            if at_fault:
                for each in row.paths:
                    self.settings.pop(each, None)
                self.rows[index] = KeyRow(row.key, row.value, "not supported", note=why, remedy=remedy)
                return True
        return False

    def mark_defaults(self, values: Mapping[str, object]) -> None:
        """Note in rows of keys that are not in the file that the value is the default of the other trainer."""
        for index, row in enumerate(self.rows):
            if row.outcome == "taken" and row.key.partition(".")[0] not in values:
                self.rows[index] = replace(row, note="; ".join(filter(None, ["the default there", row.note])))

    def nested(self) -> dict[str, object]:
        """Return the settings as nested mappings, in the order of the schema."""
        order = {name: index for index, name in enumerate(Recipe.model_fields)}
        found: dict[str, object] = {}
        for path, value in sorted(
            self.settings.items(), key=lambda item: (order[item[0].split(".")[0]], item[0][-4:] != ".use")
        ):
            *above, last = path.split(".")
            inner = found
            for key in above:
                step = inner.setdefault(key, {})
                if not isinstance(step, dict):
                    step = inner[key] = {"use": step}
                inner = step
            inner[last] = value
        return found


Rule = Callable[[Draft, str, object], None]
"""Decides on one key by adding one row to the draft."""


def apply(rules: Mapping[str, Rule], values: Mapping[str, object], draft: Draft, *, of: str, above: str = "") -> None:
    """Decide on each key of ``values``. ``of`` is the name of the format, ``above`` the prefix of keys in rows."""
    for key, value in values.items():
        if (rule := rules.get(key)) is not None:
            rule(draft, above + key, value)
        elif is_inactive(value):
            draft.skip(above + key, value, "off")
        else:
            remedy = f"docs/how-to/convert-settings.md lists the keys of {of}; write in your recipe what it does"
            draft.refuse(above + key, value, "no counterpart is known", remedy)


def is_inactive(value: object) -> bool:
    """Return True for a value that turns a feature off."""
    return value in INACTIVE if isinstance(value, str) else not value


def at(path: str, *, note: str = "") -> Rule:
    """Return the rule that copies the value to this path. null keeps the default of the recipe."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if value is None:
            draft.skip(key, value, "off")
        else:
            draft.take(key, value, {path: number(value)}, note)

    return rule


def span(path: str, unit: str, *, below_one: str = "") -> Rule:
    """Return the rule of a number of ``unit``. ``below_one`` is the unit of values below 1, which are fractions."""

    def rule(draft: Draft, key: str, value: object) -> None:
        amount = number(value)
        if value is None or amount == 0:
            draft.skip(key, value, "off")
        elif below_one and isinstance(amount, float) and amount < 1:
            draft.take(key, value, {path: f"{amount!r}{below_one}"})
        else:
            draft.take(key, value, {path: f"{whole(amount)}{unit}"})

    return rule


def switch(path: str, on: object = True) -> Rule:
    """Return the rule that sets ``on`` for true and refuses any other active value."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if value in (True, "true", "True"):
            draft.take(key, value, {path: on})
        elif is_inactive(value) or value == "false":
            draft.skip(key, value, "off")
        else:
            draft.refuse(key, value, "not one of true and false", f"set {path} in the recipe")

    return rule


def nothing(why: str) -> Rule:
    """Return the rule of a key that needs no counterpart."""
    return lambda draft, key, value: draft.skip(key, value, "off" if is_inactive(value) else why)


def refused(why: str, remedy: str) -> Rule:
    """Return the rule of a key without a counterpart. A value that turns it off needs none."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if is_inactive(value):
            draft.skip(key, value, "off")
        else:
            draft.refuse(key, value, why, remedy)

    return rule


def number(value: object) -> object:
    """Return the number in a string such as ``2e-4``, as YAML 1.1 reads it; any other value unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        amount = float(value)
        return int(amount) if value.strip().lstrip("+-").isdecimal() else amount
    return value


def whole(value: object) -> object:
    """Return ``3`` for ``3.0``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text_of(key: str, value: object) -> str:
    """Return a value as text for a row, with secrets masked."""
    return MASK if is_secret(key) and value else format_value(value)


def best(name: str) -> dict[str, object]:
    """Return the settings that keep the checkpoint with the best value of this metric."""
    return {"checkpoint.best": name, **({"metrics": [name]} if name in METRICS else {})}


def run_name(value: object) -> str:
    """Return the last part of a path as the name of a run: ``lora-out`` for ``./outputs/lora-out``."""
    last = str(value).replace("\\", "/").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last)[:100].strip("-. ") or "run"
