"""Run folders for the tests of pages, written with LogWriter. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainwright.recipe import dump, from_mapping
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Ended, Evaluated, Evidence, Found, Record, Started, Step, Tried, Where
from trainwright.runs.writer import LogWriter

BEGAN_S = 1_790_000_000.0
PLAN = {
    "parameters": 1234,
    "extent": {"steps": 100, "seconds": None},
    "lr": 0.001,
    "memory_bytes": {"weights": 4936, "activations": 65536},
    "notes": [{"topic": "threads", "choice": "2", "why": "measured"}],
}


def step(number: int, loss: float | None = None, *, grad_norm: float = 1.0, at_s: float | None = None) -> Step:
    return Step(
        time_s=BEGAN_S + number if at_s is None else at_s,
        step=number,
        loss=2.0 / math.sqrt(number) if loss is None else loss,
        grad_norm=grad_norm,
        lr=0.001,
        weight=32.0,
        samples=32 * number,
        tokens=0,
        step_s=0.5,
        wait_s=0.1,
        skipped=0,
        mem_bytes=2**20,
        ids_hash="",
    )


def started(at_step: int = 0, *, at_s: float = BEGAN_S) -> Started:
    return Started(time_s=at_s, step=at_step, version="0.1.0", pid=1, command=("trainwright", "train"))


def ended(at_step: int, ending: str = "finished", reason: str = "") -> Ended:
    return Ended(
        time_s=BEGAN_S + at_step,
        ending=ending,
        reason=reason,
        step=at_step,
        loss=0.2,
        val_loss=None,
        skipped=0,
        seconds=float(at_step),
    )


def evaluated(at_step: int, loss: float) -> Evaluated:
    return Evaluated(
        time_s=BEGAN_S + at_step, step=at_step, loss=loss, weight=1.0, metrics={"accuracy": 0.5}, seconds=0.1
    )


def found(code: str = "optim.lr_too_high", at_step: int = 20, *, text: str = "the loss jumps") -> Found:
    return Found(
        time_s=BEGAN_S + at_step,
        code=code,
        severity="critical",
        step=at_step,
        symptom=f"{text} (symptom)",
        cause=f"{text} (cause)",
        remedy=f"{text} (remedy)",
        sure=0.9,
        since_step=at_step - 2,
        where=Where(module="net.0", source=f"{text}.py:12"),
        evidence=(Evidence(measure=f"{text} (measure)", seen=3.5, expected="less"),),
        tried=(Tried(remedy=f"{text} (a tenth)", result="loss 2 -> 1"),),
    )


def make_run(
    root: Path, name: str, records: Iterable[Record], *, settings: Mapping[str, object] | None = None
) -> RunFolder:
    """Creates a run of the Trainwright engine; without ``settings``, one of a watched loop, which has no recipe."""
    folder = RunFolder.create(root, name)
    if settings is not None:
        parts = {"model": {"use": "mlp"}, "data": {"train": {"use": "digits"}}}
        folder.recipe.write_text(dump(from_mapping(parts, overrides=list(settings.items())).recipe))
        folder.write_json("plan.json", PLAN)
        folder.write_json("provenance.json", {"python": "3.11.7", "hostname": f"host-of-{name}"})
    add(folder, records)
    return folder


def add(folder: RunFolder, records: Iterable[Record]) -> None:
    log = LogWriter(folder.log)
    for record in records:
        log.write(record)
    log.close()
