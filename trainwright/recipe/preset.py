"""Presets: settings under one name, applied only if the recipe does not state them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Settings = Mapping[str, object]

RECOMMENDED: Mapping[str, Settings] = {
    "precision": {"precision": "auto"},
    "optimizer.decay_norms_and_biases": {"optimizer.decay_norms_and_biases": False},
    "optimizer.clip": {"optimizer.clip.by": "norm", "optimizer.clip.at": 1.0},
    "schedule.use": {"schedule.use": "cosine", "schedule.warmup": "0.05run"},
}
"""Settings by the path that must be unstated for them to apply: a schedule that is named gets no warm-up."""
SGD: Settings = {"optimizer.args.momentum": 0.9}
SHORT_FORMS = ("model", "loss", "optimizer", "schedule")
"""Sections for which a bare name is short for ``{use: name}``."""
MAX_PATH_KEYS = 4
"""The maximum depth of paths that are distinguished. Arguments may nest deeper, without limit if Python made them."""


def with_preset(recipe: Mapping[str, object]) -> tuple[dict[str, object], frozenset[str]]:
    """Return a raw recipe with the settings of its preset, and the paths that the preset has set.

    Values that the recipe states stay. A recipe without a preset, or with an unknown one, is returned unchanged.
    """
    if recipe.get("preset") != "recommended":
        return dict(recipe), frozenset()
    stated = frozenset(stated_paths(recipe))
    filled = dict(recipe)
    added = set()
    groups = [settings for path, settings in RECOMMENDED.items() if not _states(stated, path)]
    if _optimizer_of(recipe) == "sgd":
        groups.append(SGD)
    for path, value in ((path, value) for settings in groups for path, value in settings.items()):
        if path not in stated and _put(filled, path.split("."), value):
            added.add(path)
    return filled, frozenset(added)


def stated_paths(recipe: object, above: str = "") -> Iterator[str]:
    """Yield the dotted path of every value that a raw recipe states; a bare name of a section states its ``use``."""
    if isinstance(recipe, Mapping) and above.count(".") < MAX_PATH_KEYS - 1:
        for key, value in recipe.items():
            if isinstance(key, str):
                yield from stated_paths(value, f"{above}.{key}" if above else key)
    elif isinstance(recipe, str) and above in SHORT_FORMS:
        yield f"{above}.use"
    elif above:
        yield above


def _states(stated: frozenset[str], path: str) -> bool:
    """Return True if the path or one below it is stated."""
    return any(each == path or each.startswith(f"{path}.") for each in stated)


def _optimizer_of(recipe: Mapping[str, object]) -> object:
    section = recipe.get("optimizer")
    return section.get("use") if isinstance(section, Mapping) else section


def _put(section: dict[str, object], keys: list[str], value: object) -> bool:
    """Set a value and copy the sections on the way to it. Return False if one of them is not a mapping."""
    if len(keys) == 1:
        section[keys[0]] = value
        return True
    inside = section.get(keys[0])
    inside = {} if inside is None else {"use": inside} if isinstance(inside, str) else inside
    if not isinstance(inside, Mapping):
        return False
    section[keys[0]] = below = dict(inside)
    return _put(below, keys[1:], value)
