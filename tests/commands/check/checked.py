"""A healthy recipe, which tests change, and the results of ``trainwright check`` for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from trainwright.commands.check.check import Budget, check
from trainwright.commands.check.verdict import CheckResult
from trainwright.recipe import from_mapping

PARTS = "tests.commands.check.parts"
AMPLE = Budget(read_s=20.0, range_s=30.0, one_batch_s=30.0, smoke_s=60.0, most_samples=1024)
"""Time limits that no part reaches, even on a busy machine: it ends by its number of samples or steps."""
UNTRAINED = replace(AMPLE, range_s=0.0, one_batch_s=0.0, smoke_s=0.0)
"""No training. Most lines of the report need none."""


def recipe(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a healthy recipe with changes by dotted path. A value of None removes the key."""
    mapping: dict[str, Any] = {
        "until": "20ep",
        "device": "cpu",
        "precision": "fp32",
        "model": {"use": f"{PARTS}:net"},
        "data": {
            "train": {"use": f"{PARTS}:blobs", "args": {}},
            "val": {"use": f"{PARTS}:blobs", "args": {"split": "val"}},
        },
        "batch": {"size": 32},
        "optimizer": {"use": "adamw", "lr": 3e-3},
    }
    for path, value in changes.items():
        *sections, last = path.split(".")
        place = mapping
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    return mapping


def checked(changes: Mapping[str, Any], budget: Budget = AMPLE) -> CheckResult:
    return checked_once(json.dumps(recipe(changes)), budget)


@cache
def checked_once(mapping: str, budget: Budget) -> CheckResult:
    """Cached, because tests of several faults use the same recipe."""
    return check(from_mapping(json.loads(mapping)), budget=budget)


def model(name: str, **args: Any) -> dict[str, Any]:
    return {"model": {"use": f"{PARTS}:{name}", "args": args}}
