"""Counts the files of the package that one value passes through: ``python scripts/walks.py batch|recipe [--doctor]``.

A file counts if a function in it has the value in a local variable, or returns it. A turn back is a call or a return
that leads to a file in which the value was before. docs/concepts/architecture.md shows the result.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.data.fetch import Fetched
from trainwright.engine.step import StepResult
from trainwright.plan.trace.resolve import Resolved
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.yaml_core import Document

ROOT = str(Path(tw.__file__).parent) + "/"
ROWS, COLUMNS = 6, 13  # a shape that no other tensor has
RECIPE = "walk.yaml"
RECIPE_TEXT = """\
name: walk
until: 3steps
model: {use: resnet, args: {depth: 8, channels: 1, width: 16}}
data: {train: {use: digits, args: {split: train}}, val: {use: digits, args: {split: val}}}
loss: cross_entropy
batch: {size: 64}
"""


class Walk:
    """A profile function. While ``is_on``, records the files with a local variable for which ``is_value`` is true."""

    def __init__(self, is_value: Callable[[object], bool]) -> None:
        self.is_value, self.is_on = is_value, False
        self.files: list[str] = []
        self.names: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        if not self.is_on or event not in ("call", "return"):
            return
        self._visit(frame, value if event == "return" else None)
        caller = frame.f_back if event == "return" else None
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is not None:
            self._visit(caller)

    def _visit(self, frame: FrameType, returned: object = None) -> None:
        if not frame.f_code.co_filename.startswith(ROOT) or frame.f_code.co_name == "<module>":
            return
        file = frame.f_code.co_filename.removeprefix(ROOT)
        if file.startswith("runs/"):  # the name of the recipe in the command line, which provenance records
            return
        found = [name for name, each in list(frame.f_locals.items()) if self.is_value(each)]
        if not found and not self.is_value(returned):
            return
        known = self.names.setdefault(file, [])
        known += [name for name in found if name not in known and name.isidentifier() and name != "self"]
        if self.files[-1:] != [file]:
            self.files.append(file)

    def report(self) -> None:
        for file in dict.fromkeys(self.files):
            sys.stdout.write(f"{file:36} {', '.join(self.names[file])}\n")
        count = len(set(self.files))
        sys.stdout.write(f"{count} files, {len(self.files) - count} turns back\n")


def is_batch(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape == (ROWS, COLUMNS)
    if isinstance(value, StepBatch | MicroBatch | Fetched):
        return True
    return isinstance(value, tuple | list) and 0 < len(value) < 20 and is_batch(value[0])


def is_recipe(value: object) -> bool:
    if isinstance(value, str | Path):
        return str(value) == RECIPE
    return isinstance(value, Loaded | Recipe | Document | Resolved)


def walk_batch(*, doctor: bool) -> Walk:
    """Follows a batch of a DataLoader without workers: its reading in one step, and the training in another step."""
    walks = Walk(is_batch), Walk(is_batch)
    read_at, trained_at = 32, 30  # in the 32nd step several batches are read at once

    def observe(result: StepResult, state: object) -> None:
        walks[0].is_on, walks[1].is_on = result.step == read_at, result.step == trained_at

    model, data = nn.Linear(COLUMNS, 3), TensorDataset(torch.randn(600, COLUMNS), torch.randint(0, 3, (600,)))
    sys.setprofile(lambda *event: [walk(*event) for walk in walks])
    tw.fit(
        model,
        DataLoader(data, batch_size=ROWS, shuffle=True),
        nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        steps=60,
        observers=[observe],
        settings={"log.doctor": doctor},
        quiet=True,
    )
    sys.setprofile(None)
    read, trained = walks
    first = read.files.index("data/fetch.py")
    again = next(at for at, file in enumerate(read.files) if at > first + 1 and file == "checkpoint/cursor.py")
    end = next(at for at, file in enumerate(read.files) if at > again and file == "data/fetch.py")
    trained.files = [*read.files[first:end], *trained.files[3:]]  # the first three have the batch of the step before
    trained.names = {**trained.names, **{file: read.names[file] for file in read.files[first:end]}}
    return trained


def walk_recipe() -> Walk:
    """Follows a recipe through ``trainwright train`` until the training loop starts."""
    from trainwright.cli import main

    Path(RECIPE).write_text(RECIPE_TEXT)
    walk = Walk(is_recipe)

    def trace(frame: FrameType, event: str, value: object) -> None:
        file = frame.f_code.co_filename.removeprefix(ROOT)
        if event == "call" and (file, frame.f_code.co_name) == ("engine/loop.py", "run"):
            walk.is_on = False
        walk(frame, event, value)

    sys.argv, walk.is_on = ["trainwright", "train", RECIPE], True
    sys.setprofile(trace)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main()
    sys.setprofile(None)
    return walk


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        what, options = sys.argv[1], sys.argv[2:]
        os.chdir(folder)
        (walk_recipe() if what == "recipe" else walk_batch(doctor="--doctor" in options)).report()
