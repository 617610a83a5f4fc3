"""Trains on each kind of data three times: to the end, until a SIGKILL within an epoch, and resumed from there.

    python -m tests.training.killed docs/how-to/data.md

writes the table of that page. The killed and the resumed training are processes forked from the one that trains to the
end, which has already imported everything.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tests.warm  # noqa: F401  before the forks
import trainwright as tw
from tests.training.data_kinds import KINDS, Kind, parts_of
from trainwright.checkpoint.rng import seed_all
from trainwright.data.ready_batches import ReadyBatches
from trainwright.data.unwrap import Unwrapped, unwrap

SAVE_EVERY, KILLED_AT, UNTIL = 4, 10, 13
"""Steps. An epoch has 5 batches, so the checkpoint of step 8 is within an epoch. The kill comes two steps later."""
SAVED = KILLED_AT // SAVE_EVERY * SAVE_EVERY
MARK = "<!-- made by tests/training/killed.py -->\n"


@dataclass
class Records(tw.Observer):
    """Appends the samples of each step to a file. Kills its own process after step ``kill_at``."""

    file: Path
    kill_at: int | None

    def observe(self, result: tw.StepResult, state: tw.TrainState) -> None:
        digest, targets = hashlib.sha256(), list[int]()
        for x, y in (parts_of(micro.data) for micro in result.batch.micro):
            digest.update(x.numpy().tobytes())
            targets += y.tolist()
        with self.file.open("a") as file:
            file.write(json.dumps([result.step, digest.hexdigest(), targets, result.batch.ids.tolist()]) + "\n")
        if result.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None: ...


@dataclass(frozen=True)
class Trained:
    """The results of the three trainings of one kind."""

    kind: Kind
    folder: Path

    @property
    def statuses(self) -> list[int]:
        """Exit statuses of the two forked processes, as returned by ``os.waitpid``."""
        return list(map(int, (self.folder / "statuses").read_text().split()))

    @cached_property
    def whole(self) -> dict[int, list[Any]]:
        return _steps(self.folder / "whole" / "first")

    @cached_property
    def resumed(self) -> dict[int, list[Any]]:
        return _steps(self.folder / "parts" / "resumed")

    @property
    def in_parts(self) -> dict[int, list[Any]]:
        """Return the samples that the final weights were trained on. Steps after the checkpoint count once."""
        return _steps(self.folder / "parts" / "first") | self.resumed

    @property
    def same_weights(self) -> bool:
        one, other = (torch.load(self.folder / part / "weights") for part in ("whole", "parts"))
        return all(torch.equal(one[name], other[name]) for name in one)

    @property
    def notes(self) -> dict[str, str]:
        """Return the notes on data in the plan of the resumed run."""
        (plan,) = (self.folder / "parts").glob("run*/plan.json")
        return {note["choice"]: note["why"] for note in json.loads(plan.read_text())["notes"]}

    @property
    def output(self) -> str:
        return (self.folder / "parts" / "output").read_text()

    @cached_property
    def unwrapped(self) -> Unwrapped:
        data = self.kind.make()
        return unwrap(data["train"] if isinstance(data, dict) and "train" in data else data)

    @property
    def ids(self) -> str:
        found = self.unwrapped
        if isinstance(found.dataset, ReadyBatches):
            counted = all(len(ids) == len(targets) for _, targets, ids in self.whole.values())
            return "number of the row in the epoch" if counted else "unknown: the number of the batch"
        return "position in the stream" if isinstance(found.dataset, torch.utils.data.IterableDataset) else POSITION

    @property
    def how(self) -> str:
        """How the kind is resumed, as text for the table."""
        said = self.notes.get("resumed", "")
        exact = "exact" if self.kind.exact else "**not exact, and it says so**"
        if not said:
            return f"{exact}: from its position" if "stream" not in self.ids else f"{exact}: samples are read again"
        ways = {"drawn again": "the order is drawn again", "own state": "from its own state"}
        return f"{exact}: {next((way for word, way in ways.items() if word in said), 'batches are read again')}"


POSITION = "position in the dataset"


def _steps(file: Path) -> dict[int, list[Any]]:
    return {step: rest for step, *rest in map(json.loads, file.read_text().splitlines())}


def table(trained: list[Trained]) -> str:
    """Returns the table of docs/how-to/data.md."""
    lines = [f"| {each.kind.name} | {each.ids} | {each.how} |" for each in trained]
    return "\n".join(["| data | sample id | resume within an epoch |", "|---|---|---|", *lines]) + "\n"


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = parts_of(batch)
    return nn.functional.cross_entropy(model(x), y)


def train(kind: Kind, folder: Path, kill_at: int | None, resume: Path | None) -> None:
    seed_all(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    settings = {
        "folder": str(folder),
        "log.doctor": False,
        "precision": "fp32",
        "checkpoint.every": f"{SAVE_EVERY}steps",
        "checkpoint.asynchronous": False,
        "evaluation.every": "5steps",
    }
    records = Records(folder / ("resumed" if resume else "first"), kill_at)
    tw.fit(model, kind.make(), loss, until=f"{UNTIL}steps", settings=settings, resume=resume, observers=[records])
    torch.save(model.state_dict(), folder / "weights")


def in_child(kind: Kind, folder: Path, *, kill_at: int | None = None, resumes: bool = False) -> int:
    """Trains in a forked process. Returns its exit status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        train(kind, folder, kill_at, folder / "run" if resumes else None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(folder: Path, first: int, every: int, kinds: list[Kind] = KINDS) -> None:
    """Trains each ``every``-th kind from the ``first`` on."""
    torch.set_num_threads(1)
    for number in range(first, len(kinds), every):
        kind, whole, parts = kinds[number], *(folder / str(number) / name for name in ("whole", "parts"))
        print(kind.name, flush=True)
        for each in (whole, parts):
            each.mkdir(parents=True)
        train(kind, whole, None, None)
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy the pages of all objects that it visits
        statuses = [in_child(kind, parts, kill_at=KILLED_AT), in_child(kind, parts, resumes=True)]
        (folder / str(number) / "statuses").write_text(" ".join(map(str, statuses)))


def results(folder: Path, kinds: list[Kind] = KINDS) -> list[Trained]:
    return [Trained(kind, folder / str(number)) for number, kind in enumerate(kinds)]


def main() -> None:
    page = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), 0, 1)
        before, mark, _ = page.read_text().partition(MARK)
        page.write_text(before + mark + table(results(Path(folder))))


if __name__ == "__main__":
    main()
