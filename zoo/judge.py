"""Runs an entry of the zoo under ``tw.watch`` and scores the doctor's findings."""

from __future__ import annotations

import importlib
import pkgutil
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import trainwright as tw
import zoo
from trainwright.runs.records import Watched
from zoo.host import ENTRIES, Entry

LATEST = {"N": 0, "S": 1, "B": 50, "P": 20, "M": 200}
"""For each class of ``Entry.delay``: the most optimizer steps from ``Entry.active`` to the finding."""
LEAD = 3
"""How many steps before the loss doubles a divergence (class D) has to be found."""


@dataclass
class Score:
    """The result of one run. ``detected``: any alarm (warning or critical) since ``Entry.active`` and none ``early``.

    ``rank``: position among the findings, from 0, of the first with an accepted code; None: there is none. ``delay``:
    steps from ``Entry.active`` to it. ``doubled`` (class D only): step at which the loss had doubled; None: never.
    ``failed``: an exception within the doctor. ``error`` has this exception or else the program's own.
    """

    id: str
    seed: int
    detected: bool = False
    early: list[str] = field(default_factory=list)
    rank: int | None = None
    delay: int | None = None
    doubled: int | None = None
    in_time: bool = False
    located: bool | None = None
    tried: bool | None = None
    said: list[str] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None
    failed: bool = False
    where: Any = None
    truth: Any = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load() -> dict[str, Entry]:
    """All entries of the zoo, by id."""
    for module in pkgutil.iter_modules(zoo.__path__):
        if module.name not in ("host", "judge"):
            importlib.import_module(f"{zoo.__name__}.{module.name}")
    return ENTRIES


def run(entry: Entry, seed: int) -> tuple[Score, Sequence[Any]]:
    """Runs the program once under ``tw.watch``. Returns its score and the findings."""
    torch.manual_seed(seed)
    watches: list[Any] = []

    def watch(*args: Any, **kwargs: Any) -> Any:
        watches.append(tw.watch(*args, **kwargs, quiet=True))
        return watches[-1]

    begin_s, truth, error = time.perf_counter(), None, None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            truth = entry.run(partial(watch, out=Path(folder) / "run"), seed)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    found = [each for one in watches for each in one.findings()]
    score = _scored(entry, seed, found, truth, watches)
    score.steps = sum(one.step for one in watches)
    failures = [str(each) for one in watches for each in one.session.failures]
    failures += [each.symptom for each in found if each.code == "doctor.failed"]
    score.seconds, score.error = round(time.perf_counter() - begin_s, 2), "; ".join(failures) or error
    score.failed = bool(failures)
    return score, found


def _scored(
    entry: Entry, seed: int, found: Sequence[Any], truth: Mapping[str, Any] | None, watches: Sequence[Any]
) -> Score:
    score = Score(entry.id, seed, said=[f"{f.code}@{f.step}" for f in found], truth=truth)
    alarms = [f for f in found if f.severity in ("critical", "warning")]
    score.critical = [f.code for f in found if f.severity == "critical"]
    score.warned = [f.code for f in found if f.severity == "warning"]
    score.early = [f"{f.code}@{f.step}" for f in alarms if f.step < entry.active]
    score.detected = any(f.step >= entry.active for f in alarms) and not score.early
    right = [rank for rank, f in enumerate(found) if f.code in entry.labels]
    if not right:
        return score
    score.rank = right[0]
    best = found[right[0]]
    score.delay = best.step - entry.active
    if entry.delay == "D":
        score.doubled = _doubled(watches, entry.active)
        at_once = score.delay == 0  # no finding can be earlier, and some losses double in the second step
        score.in_time = at_once or score.doubled is None or best.step <= score.doubled - LEAD
    else:
        score.in_time = 0 <= score.delay <= LATEST[entry.delay]
    score.tried = bool(best.tried) if entry.fixable else None
    score.where = asdict(best.where)
    if entry.delay == "N" and truth:
        score.located = all(_same(score.where.get(name), value) for name, value in truth.items())
    return score


def _doubled(watches: Sequence[Any], active: int) -> int | None:
    """The first step with a loss of at least twice that at step ``active``, or NaN."""
    losses = [(r.step, r.loss) for one in watches for r in one.records if isinstance(r, Watched) and r.step >= active]
    return next((step for step, loss in losses if not loss < 2 * losses[0][1]), None)


def _same(seen: Any, true: Any) -> bool:
    if isinstance(true, list | tuple):
        return sorted(seen or ()) == sorted(true)
    return bool(seen == true)


def one(name: str, seed: int) -> dict[str, Any]:
    """Loads the zoo and runs one entry with one thread; called in processes of a pool. Returns the score as JSON."""
    torch.set_num_threads(1)
    return run(load()[name], seed)[0].to_json()
