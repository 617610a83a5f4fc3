"""Reads the contents of a verified checkpoint and rejects invalid contents before anything is loaded into a run.

A matching hash proves that a file is not damaged. It does not prove that the file contains the state of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torch import Tensor

from trainwright.checkpoint.codec import StateDict, Tree, decode
from trainwright.checkpoint.manifest import invalid_content, raising_checkpoint_error, read_manifest, read_state, verify
from trainwright.checkpoint.rng import RngBag
from trainwright.checkpoint.stored import StoredTensor, read_whole
from trainwright.checkpoint.tensor_file import open_tensors


class Kind(NamedTuple):
    """Condition on a single value. ``name`` describes it in errors."""

    name: str
    holds: Callable[[Tree], bool]


class Maybe(NamedTuple):
    """Also accepts None or {}: the run had no such part."""

    rule: Rule


Rule: TypeAlias = "Kind | Maybe | list[Rule] | dict[str, Rule]"
"""A list has one rule, which applies to each item.

A dict must have these keys ('*': all keys; 'name?': optional), and may have others.
"""

ANYTHING = Kind("a value", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor | StoredTensor))
NATURAL = Kind("a whole number from 0 to 2^63 - 1", lambda value: type(value) is int and 0 <= value < 2**63)
AMOUNT = Kind("a finite number >= 0", lambda value: type(value) in (int, float) and 0 <= value < 2.0**1023)
FLOAT = Kind("a float", lambda value: type(value) is float)


def violations(value: Tree, rule: Rule, path: str) -> Iterator[str]:
    """Yield descriptions of what in ``value``, named ``path``, breaks the rule."""
    match rule:
        case Maybe(rule=inner) if value is not None and value != {}:
            yield from violations(value, inner, path)
        case Kind(name=name, holds=holds) if not holds(value):
            yield f"{path} is {brief(value)}, not {name}"
        case list() if not isinstance(value, list | tuple):
            yield f"{path} is {brief(value)}, not a list"
        case list():
            for index, each in enumerate(value):
                yield from violations(each, rule[0], f"{path}.{index}")
        case dict() if not isinstance(value, dict):
            yield f"{path} is {brief(value)}, not a mapping"
        case dict():
            for key, below in rule.items():
                yield from _violations_below(value, key, below, path)


def _violations_below(value: Mapping[str, Tree], key: str, rule: Rule, path: str) -> Iterator[str]:
    if key == "*":
        for name, each in value.items():
            yield from violations(each, rule, f"{path}.{name}")
    elif (name := key.removesuffix("?")) in value:
        yield from violations(value[name], rule, f"{path}.{name}")
    elif name == key:
        yield f"{path} has no {name!r}"


def brief(value: Tree) -> str:
    """Return a short text of a value."""
    if isinstance(value, Tensor | StoredTensor):
        return f"a tensor of {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


PARTS = ("model", "rest")
REST: Rule = {
    "optimizer": {"class": TEXT, "built": {}, "state": {}, "own": {}, "param_groups": [{"params": [TEXT]}]},
    "scaler": Maybe({"scale": AMOUNT, "clean_steps": NATURAL}),
    "ema": Maybe({"kind?": TEXT, "num_updates": NATURAL, "shadow": {"*": TENSOR}}),
    "training_weights?": {"*": TENSOR},
    "loss": {},
    "transient": {"*": TENSOR},
    "ledger": {
        "entries": [
            {
                "step": NATURAL,
                "reason": TEXT,
                "loss": FLOAT,
                "grad_norm": FLOAT,
                "micro_batch": Maybe(NATURAL),
                "sample_ids": [NATURAL],
                "scale": Maybe(AMOUNT),
            }
        ]
    },
    "spikes?": Maybe(
        {
            "norms": [AMOUNT],
            "in_a_row": NATURAL,
            "count": NATURAL,
            "usual": AMOUNT,
            "initial": AMOUNT,
            "limit": AMOUNT,
        }
    ),
    "quarantine": [NATURAL],
    "rng": {},
    "data": {
        "epoch": NATURAL,
        "position": NATURAL,
        "digest?": TEXT,
        "stream?": Maybe({"own": ANYTHING, "rng": {}}),
        "start?": Maybe({"rng": {}, "held": [ANYTHING]}),
    },
    "counters": {
        "step": NATURAL,
        "num_samples": NATURAL,
        "num_tokens": NATURAL,
        "elapsed_s": AMOUNT,
        "fraction": AMOUNT,
    },
    "micro_limit?": Maybe(NATURAL),
    "stateful?": {"*": {}},
}


@dataclass(frozen=True)
class Contents:
    """The decoded parts of a checkpoint. ``tensors`` has the memory-mapped tensors of each part, by name.

    If several ranks wrote the checkpoint, weights, moments and averages are of the class ``StoredTensor``, because
    ranks may divide them.
    """

    model: StateDict
    rest: StateDict
    rng: RngBag
    tensors: Mapping[str, Mapping[str, Tensor | StoredTensor]]


def require_whole(path: Path) -> None:
    """Raise CheckpointError unless a checkpoint is undamaged and can be loaded."""
    verify(path)
    read_contents(path)


def read_contents(path: Path) -> Contents:
    """Read a verified checkpoint. Raises CheckpointError unless every part is present and of the right type."""
    with raising_checkpoint_error(path):
        tensors = {part: open_tensors(path, part) for part in PARTS}
        values = read_state(path)
        for problem in violations(values, dict.fromkeys(PARTS, ANYTHING), "state.json"):
            raise invalid_content(path, problem)
        model, rest = (_decoded(path, part, tensors[part], values[part]) for part in PARTS)
        for problem in violations(model, {}, "state.json: model"):
            raise invalid_content(path, problem)
        for problem in violations(rest, REST, "state.json: rest"):
            raise invalid_content(path, problem)
        rest = _with_small_parts(rest)
        if rest["counters"]["step"] != (step := read_manifest(path)["step"]):
            raise invalid_content(
                path, f"state.json holds step {rest['counters']['step']}, and the manifest says {step}"
            )
        return Contents(model, rest, RngBag.from_state_dict(rest["rng"]), tensors)


_OF_WEIGHTS = ("ema", "training_weights")


def _with_small_parts(rest: StateDict) -> StateDict:
    """Read all stored tensors except weights, moments and averages."""
    small = {key: each if key in _OF_WEIGHTS else read_whole(each) for key, each in rest.items() if key != "optimizer"}
    optimizer = {key: each if key == "state" else read_whole(each) for key, each in rest["optimizer"].items()}
    return {**small, "optimizer": optimizer}


def _decoded(path: Path, part: str, tensors: Mapping[str, Tensor | StoredTensor], values: Tree) -> StateDict:
    try:
        decoded: StateDict = decode(tensors, values)
    except KeyError as error:
        raise invalid_content(path, f"state.json refers to {error}, which is not in the tensors of {part}") from None
    return decoded
