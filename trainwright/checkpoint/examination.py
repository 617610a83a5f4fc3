"""Examines a checkpoint in more depth than its manifest allows, and finds what differs between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainwright.checkpoint.codec import StateDict, Tree, same_bits
from trainwright.checkpoint.contents import PARTS, Contents, brief, read_contents
from trainwright.checkpoint.manifest import NAME, read_manifest, read_state, step_of, verify
from trainwright.checkpoint.stored import read_whole
from trainwright.checkpoint.tensor_file import open_tensors
from trainwright.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointReport:
    """Result of the examination of a checkpoint. A problem makes it useless, a warning does not."""

    path: Path
    step: int | None
    num_bytes: int = 0
    num_tensors: int = 0
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return a readable line on the checkpoint, and one for each warning."""
        if self.problems:
            return [f"broken   {self.path}: {'; '.join(self.problems)}"]
        size = f"{self.num_bytes:,} bytes, {self.num_tensors} tensors"
        return [f"ok       {self.path}: step {self.step}, {size}", *(f"warning  {each}" for each in self.warnings)]

    def to_json(self) -> StateDict:
        """Return the value for ``--json``."""
        return {
            "path": str(self.path),
            "ok": not self.problems,
            "step": self.step,
            "bytes": self.num_bytes,
            "tensors": self.num_tensors,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }


def examine(path: Path) -> CheckpointReport:
    """Check manifest, sizes, hashes, unlisted files, every tensor, and every reference to a tensor. Executes nothing.

    Reads each file twice: for its hash, and to find non-finite values.
    """
    try:
        manifest = read_manifest(path)
        files: StateDict = manifest["files"]
        found = sorted(each for each in path.iterdir() if each.name not in files and each.name != NAME)
        unlisted = [f"{each} is not in the manifest" for each in found]
    except CheckpointError as error:
        return CheckpointReport(path, step_of(path), problems=(error.message,))
    try:
        verify(path)
        contents = read_contents(path)
    except CheckpointError as error:
        return CheckpointReport(path, manifest["step"], problems=(error.message, *unlisted))
    return CheckpointReport(
        path,
        manifest["step"],
        sum(entry["bytes"] for entry in files.values()),
        sum(map(len, contents.tensors.values())),
        tuple(unlisted),
        tuple(_not_finite(contents)),
    )


def _not_finite(contents: Contents) -> Iterator[str]:
    """Yield a line for each tensor with NaN, and for each trained weight, average or moment with infinity.

    Other tensors, such as the buffer of a mask, may have infinity.
    """
    trained = {name for group in contents.rest["optimizer"]["param_groups"] for name in group["params"]}
    for part, held in contents.tensors.items():
        for name, tensor in held.items():
            tensor = read_whole(tensor)
            if not tensor.is_floating_point():
                continue
            values = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no isinf for float8
            nan = int(values.isnan().sum())
            must_be_finite = name in trained if part == "model" else name.startswith(("optimizer.", "ema."))
            infinite = int(values.isinf().sum()) if must_be_finite else 0
            if nan or infinite:
                kind = "NaN" if nan else "infinite"
                yield f"{part}.safetensors: {nan or infinite} of {tensor.numel()} values of {name} are {kind}"


@dataclass(frozen=True)
class CheckpointDifference:
    """A named tensor or value that differs; ``largest`` is the largest absolute difference between two tensors."""

    what: str
    how: str
    largest: float | None = None

    def __str__(self) -> str:
        return f"{self.what} ({self.how})"


def differences(one: Path, two: Path) -> Iterator[CheckpointDifference]:
    """Yield every tensor and value whose bits differ in two verified checkpoints, except the run metadata."""
    for part in PARTS:
        ours, theirs = (open_tensors(each, part) for each in (one, two))
        for name in sorted({*ours, *theirs}):
            if (found := _difference(read_whole(ours.get(name)), read_whole(theirs.get(name)))) is not None:
                yield CheckpointDifference(f"{part} {name}", *found)
    ours, theirs = map(read_state, (one, two))
    for name in sorted({*ours, *theirs} - {"metadata"}):
        yield from _unequal(name, ours.get(name), theirs.get(name))


def _difference(one: Tensor | None, two: Tensor | None) -> tuple[str, float | None] | None:
    if one is None or two is None:
        return "only in one of them", None
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{one.dtype} {tuple(one.shape)} and {two.dtype} {tuple(two.shape)}", None
    if same_bits(one, two):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    largest = float((one.to(wide) - two.to(wide)).abs().max())
    return f"by up to {largest:.3g}", largest


def _unequal(path: str, one: Tree, two: Tree) -> Iterator[CheckpointDifference]:
    """Yield the leaves of state.json that differ. They are compared as text, which distinguishes 0.0 from -0.0."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in sorted({*one, *two}):
            yield from _unequal(f"{path}.{key}", one.get(key), two.get(key))
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for i, (first, second) in enumerate(zip(one, two)):
            yield from _unequal(f"{path}.{i}", first, second)
    elif repr(one) != repr(two):
        yield CheckpointDifference(path, f"{brief(one)} and {brief(two)}")
