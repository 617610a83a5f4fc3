"""Reads the contents of a verified checkpoint and rejects invalid contents before anything is loaded into a run.

A matching hash proves that nothing was damaged since. It does not prove that the content was the state of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainwright.checkpoint.codec import StateDict, Tree, decode
from trainwright.checkpoint.manifest import invalid_content, raising_checkpoint_error, read_manifest, read_state, verify
from trainwright.checkpoint.rng import RngBag
from trainwright.checkpoint.schema import AMOUNT, ANYTHING, FLOAT, NATURAL, TENSOR, TEXT, Maybe, Rule, violations
from trainwright.checkpoint.stored import StoredTensor, read_whole
from trainwright.checkpoint.tensor_file import open_tensors

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
    """Read all stored tensors except those of weights, moments and averages."""
    small = {key: each if key in _OF_WEIGHTS else read_whole(each) for key, each in rest.items() if key != "optimizer"}
    optimizer = {key: each if key == "state" else read_whole(each) for key, each in rest["optimizer"].items()}
    return {**small, "optimizer": optimizer}


def _decoded(path: Path, part: str, tensors: Mapping[str, Tensor | StoredTensor], values: Tree) -> StateDict:
    try:
        decoded: StateDict = decode(tensors, values)
    except KeyError as error:
        raise invalid_content(path, f"state.json refers to {error}, which is not in the tensors of {part}") from None
    return decoded
