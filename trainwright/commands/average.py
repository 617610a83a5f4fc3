"""``average RUN``: writes the mean of the newest checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.contents import require_whole
from trainwright.checkpoint.manifest import name_of, step_of
from trainwright.checkpoint.store import checkpoints
from trainwright.checkpoint.weights import read_weights
from trainwright.commands.export import draft_folder, new_folder, save_safetensors
from trainwright.errors import CheckpointError, UsageError
from trainwright.runs.folder import RunFolder, identity_of


@dataclass(frozen=True)
class AveragedCheckpoints:
    """A folder with the mean of checkpoints.

    Attributes:
        path: The folder.
        steps: The steps of the averaged checkpoints, the newest first.
        tensors: The number of tensors.
        bytes: The size of the file.
        stepped_over: A message for each damaged checkpoint that was skipped.
    """

    path: Path
    steps: tuple[int, ...]
    tensors: int
    bytes: int
    stepped_over: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0

    def lines(self) -> list[str]:
        """Return the text output."""
        steps = ", ".join(f"{step:,}" for step in self.steps)
        return [
            *(f"checkpoint skipped: {message}" for message in self.stepped_over),
            str(self.path),
            f"  the mean of steps {steps}: {self.tensors} tensors, {self.bytes:,} bytes",
        ]

    def to_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {**vars(self), "path": str(self.path), "steps": list(self.steps), "stepped_over": [*self.stepped_over]}


def average_checkpoints(run: Path, *, last: int = 5, out: Path | None = None) -> AveragedCheckpoints:
    """Write the mean of the ``last`` newest intact checkpoints into the new folder ``out``.

    Every floating-point or complex tensor is averaged in float64, including running statistics. Other tensors are those
    of the newest checkpoint. No code of the run is executed, and LoRA adapters are not merged.

    Raises UsageError if the run has fewer checkpoints or their tensors differ, StorageError if ``out`` cannot be
    written.
    """
    folder = RunFolder.open(run)
    paths, damaged = _newest(folder, last)
    steps = tuple(step for path in paths if (step := step_of(path)) is not None)
    out = new_folder(folder, f"average-of-{last}-{name_of(steps[0])}", out)
    with draft_folder(out) as draft:
        weights = _mean(paths)
        about = {"format": "pt", "steps": " ".join(map(str, steps)), "weights": "mean of checkpoints"}
        save_safetensors(weights, draft, about)
        num_bytes = sum(file.stat().st_size for file in draft.iterdir())
    return AveragedCheckpoints(out, steps, len(weights), num_bytes, damaged)


def _newest(run: RunFolder, count: int) -> tuple[list[Path], tuple[str, ...]]:
    found, damaged = list[Path](), list[str]()
    for path in checkpoints(run.checkpoints, identity_of(run)):
        if len(found) == count:
            break
        if step_of(path) in map(step_of, found):  # a save that was killed left it
            continue
        try:
            require_whole(path)
            found.append(path)
        except CheckpointError as error:
            damaged.append(error.message)
    if len(found) < count:
        raise UsageError(
            "\n".join([*damaged, f"{run.path} has {len(found)} checkpoints that verify, and {count} are requested"]),
            remedy=f"give --last {len(found)}, or train with checkpoint.keep: {count}"
            if len(found) > 1
            else f"train with checkpoint.keep: {count} and a smaller checkpoint.every",
        )
    return found, tuple(damaged)


def _mean(paths: Sequence[Path]) -> StateDict:
    """Return the mean. Holds one checkpoint in memory at a time. A tied weight stays one tensor under several names."""
    newest = read_weights(paths[0])
    sums = {id(each): each.to(_sum_dtype(each)) for each in newest.values() if _is_averaged(each)}
    shapes = _shapes(newest)
    for path in paths[1:]:
        weights = read_weights(path)
        if _shapes(weights) != shapes:
            raise UsageError(
                f"the tensors of {path} differ from those of {paths[0]} in name or shape",
                remedy="average fewer checkpoints, with --last: those since the model was changed",
            )
        added = set[int]()
        for name, each in newest.items():
            if id(each) in sums and id(each) not in added:
                sums[id(each)] += weights[name]
                added.add(id(each))
    means = {id(each): (sums[id(each)] / len(paths)).to(each.dtype) for each in newest.values() if id(each) in sums}
    return {name: means.get(id(each), each) for name, each in newest.items()}


def _is_averaged(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _shapes(weights: StateDict) -> dict[str, torch.Size | None]:
    return {name: each.shape if isinstance(each, Tensor) else None for name, each in weights.items()}
