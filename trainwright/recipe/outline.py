"""Finds what the schema allows at a dotted path, for "did you mean" and for overrides."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from trainwright.recipe.formatting import format_value
from trainwright.recipe.schema import Recipe
from trainwright.recipe.section import Part, Section
from trainwright.recipe.source import join_path


def section_at(keys: Sequence[str]) -> type[Section] | None:
    """Return the section at this path, or None if the path leads to a value."""
    if not keys:
        return Recipe
    field = field_at(keys)
    return section_in(field.annotation) if field else None


def field_at(keys: Sequence[str]) -> FieldInfo | None:
    """Return the field at this path; the index of a list counts as the list itself."""
    section: type[Section] | None = Recipe
    field: FieldInfo | None = None
    for key in keys:
        if field is not None and is_list(field) and is_index(key):
            continue
        field = section.model_fields.get(key) if section else None
        section = section_in(field.annotation) if field else None
    return field


def is_list(field: FieldInfo) -> bool:
    """Return True if the field holds a list."""
    return get_origin(field.annotation) is tuple


def is_index(key: str) -> bool:
    """Return True if ``key`` can be an index into a list."""
    return key.isascii() and key.isdecimal() and len(key) <= 6


def choices(field: FieldInfo) -> tuple[object, ...]:
    """Return the permitted values of a field that has a closed list."""
    return tuple(_literals(field.annotation))


def keys_named(key: str) -> list[str]:
    """Return every path in the schema that ends in this key, the nearest to the top first."""
    return sorted((path for path in _paths(Recipe, "") if path.split(".")[-1] == key), key=lambda path: path.count("."))


def _paths(section: type[Section], above: str) -> Iterator[str]:
    for key, field in section.model_fields.items():
        yield above + key
        inner = section_in(field.annotation)
        if inner and not is_list(field):  # a remedy cannot name an item of a list
            yield from _paths(inner, f"{above}{key}.")


def section_in(annotation: object) -> type[Section] | None:
    """Return the section in this annotation, or None if it has none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


def _literals(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _literals(part)


# Keys of other training systems, and the path of the same setting here.
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "betas": "optimizer.args.betas",
    "momentum": "optimizer.args.momentum",
    "optim": "optimizer",
    "grad_clip": "optimizer.clip.at",
    "max_grad_norm": "optimizer.clip.at",
    "gradient_clip_val": "optimizer.clip.at",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "warmup_steps": "schedule.warmup",
    "batch_size": "batch.size",
    "micro_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "accumulate_grad_batches": "batch.accumulation",
    "epochs": "until",
    "num_epochs": "until",
    "num_train_epochs": "until",
    "max_epochs": "until",
    "max_steps": "until",
    "steps": "until",
    "dataset": "data.train",
    "num_workers": "data.workers",
    "gradient_checkpointing": "model.activation_checkpointing",
    "criterion": "loss",
    "loss_fn": "loss",
    "dtype": "precision",
    "amp": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "mixed_precision": "precision",
    "eval_steps": "evaluation.every",
    "eval_every": "evaluation.every",
    "eval_interval": "evaluation.every",
    "val_check_interval": "evaluation.every",
    "limit_val_batches": "evaluation.batches",
    "per_device_eval_batch_size": "evaluation.batch",
    "save_steps": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "save_top_k": "checkpoint.keep",
    "monitor": "checkpoint.best",
    "metric_for_best_model": "checkpoint.best",
    "logging_steps": "log.every",
    "log_every": "log.every",
    "log_interval": "log.every",
    "log_every_n_steps": "log.every",
    "devices": "parallel",
    "strategy": "parallel",
    "output_dir": "folder",
    "default_root_dir": "folder",
    "logger": "log.sinks",
    "report_to": "log.sinks",
}
EARLY_STOPPING_KEYS = ("early_stopping", "early_stopping_patience", "patience")
_OTHER_VALUES = {
    "gpu": "cuda",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "32-true": "fp32",
    "bfloat16": "bf16",
    "16": "fp16",
    "32": "fp32",
    "off": "none",
    "false": "none",
}


def path_of_key(key: str) -> str:
    """Return the path of a setting by its last key, or by its name in another training system; "" if unknown."""
    return _OTHER_NAMES.get(key) or next(iter(keys_named(key)), "")


def for_unknown_key(keys: tuple[str, ...]) -> str:
    """Return the remedy for a key that its section lacks: the section that has it, or the nearest key."""
    *above, key = keys
    section = section_at(above)
    allowed = list(section.model_fields) if section else []
    here = ".".join(above)
    elsewhere = [path for path in keys_named(key) if path.rpartition(".")[0] != here]
    if section is not None and issubclass(section, Part) and key != "name":
        return _for_key_of_part(key, here, allowed, elsewhere)
    if key in _OTHER_NAMES:
        return f"write it as {_OTHER_NAMES[key]}"
    if key in EARLY_STOPPING_KEYS:
        return "write observers: [{use: early_stopping, args: {patience: 3}}]"
    if elsewhere:
        return f"write it as {_either(elsewhere)}{'' if '.' in elsewhere[0] else ', at the top level'}"
    close = _closest(key, allowed)
    return f"did you mean {join_path(here, close)}?" if close else f"keys here are {', '.join(allowed)}"


def _for_key_of_part(key: str, here: str, allowed: list[str], elsewhere: list[str]) -> str:
    """Return the remedy for an unknown key of a part, which is most likely one of its arguments."""
    close = _closest(key, allowed)
    if close:
        return f"did you mean {join_path(here, close)}?"
    argument = f"if it is an argument of the object that `use` names, write {here}.args.{key}"
    places = [_OTHER_NAMES[key]] if key in _OTHER_NAMES else elsewhere
    places = [place for place in places if not place.startswith(f"{here}.args")]
    return f"{argument}; a recipe also has {_either(places)}" if places else argument


def closest_choice(got: object, allowed: Sequence[object]) -> str:
    """Return the remedy for a value that is not in a closed list."""
    word = format_value(got).strip("'").lower() if isinstance(got, (str, int)) else ""
    names = [value for value in allowed if isinstance(value, str)]
    familiar = _OTHER_VALUES.get(word)
    close = familiar if familiar in names else _closest(word, names)
    if close:
        return f"did you mean {close}?"
    if word in ("yes", "on", "no", "off") and True in allowed:
        return f"write {'true' if word in ('yes', 'on') else 'false'}"
    return f"write one of them, for example {names[0]}"


def _closest(word: str, names: Sequence[str]) -> str:
    # get_close_matches takes quadratic time, and no name has 100 letters
    return next(iter(difflib.get_close_matches(word[:100], names, n=1, cutoff=0.6)), "")


def _either(paths: list[str]) -> str:
    return " or ".join(paths[:4])
