"""``checks new CODE``: begins a check of the doctor, with its test."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.discovery import all_checks
from trainwright.errors import UsageError, suggest
from trainwright.runlog.json_values import JsonValue

_CHECK = '''\
"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext


@check(stage="loop", severity="warning", confidence=0.8)  # and needs=LayersFacts: without these it is not called
def {name}(run: RunContext) -> Iterator[Result]:
    """One sentence that says what is wrong, in the user's words: the title of the page.

    Why it matters: what it does to the training.

    How it is detected: what is compared with what, from which step on, and the tolerance with its reason.

    Exceptions: correct programs that look like it, and why the check is silent on them.

    Usual cause: what people write by mistake.

    Looks like: other codes, and how to tell them apart.

    Fix: one sentence; then code.

        the line that is right

    Sources: two independent public reports, as owner/repository#123.
    """
    if not run.steps:  # replace these by facts: facts = run.latest(LayersFacts); see trainwright/doctor/facts/
        yield NotApplicable("why the check says nothing about this run")
        return
    for step in run.steps:
        if step.loss != step.loss:  # replace this condition
            yield run.finding(step.step, symptom="what is wrong, with numbers", evidence=[("loss", step.loss)])
            return
    yield Passed(f"{len(run.steps)} steps")
'''
_TEST = '''\
"""{code} on faulty and on healthy programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loops import alarms, mlp, watched

CODE = "{code}"
pytestmark = pytest.mark.slow  # the loops below take half a second or more


def broken(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * float("nan")  # plant the fault here, or in the model


@pytest.mark.parametrize("layer", [nn.Identity(), nn.LayerNorm(32)])
def test_the_fault_is_found(layer: nn.Module) -> None:
    torch.manual_seed(0)
    assert CODE in alarms(watched(mlp(layer), loss=broken))


@pytest.mark.parametrize("layer", [nn.Identity(), nn.LayerNorm(32)])
def test_a_healthy_program_has_no_finding(layer: nn.Module) -> None:
    torch.manual_seed(0)
    assert alarms(watched(mlp(layer))) == []
'''


@dataclass(frozen=True)
class NewCheck:
    """The two files."""

    check: Path
    test: Path

    exit_code = 0

    def lines(self) -> list[str]:
        """For a person."""
        return [
            f"check  {self.check}",
            f"test   {self.test}",
            f"run    .venv/bin/python -m pytest -n 0 {self.test}",
            "pages  .venv/bin/python scripts/checks.py",
            "read   docs/doctor.md, Adding a check",
        ]

    def to_json(self) -> dict[str, JsonValue]:
        """What ``--json`` prints."""
        return {"check": str(self.check), "test": str(self.test)}


def new_check(code: str, root: Path = Path()) -> NewCheck:
    """Write the files of a new check into the checkout of Trainwright in ``root``.

    Raises:
        UsageError: ``root`` is no checkout, the code is not ``topic.name`` with a known topic, or exists.
    """
    topic, _, name = code.partition(".")
    folder = root / "trainwright" / "doctor"
    if not folder.is_dir():
        raise UsageError("a check is a file of Trainwright's source", remedy="call it in a checkout of the repository")
    topics = {each.topic: each.pack for each in all_checks()}
    if topic not in topics:
        raise UsageError(f"there is no topic {topic!r}", remedy=suggest(topic, list(topics)))
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(f"{code!r} is no code", remedy=f"write {topic}.what_is_wrong, in lower case")
    kind = "contrib" if topics[topic] else "checks"
    made = NewCheck(folder / kind / topic / f"{name}.py", root / "tests" / "doctor" / kind / topic / f"test_{name}.py")
    for path, text in ((made.check, _CHECK), (made.test, _TEST)):
        if path.exists():
            raise UsageError(f"{path} exists", remedy="take another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{name}", name).replace("{code}", code), encoding="utf-8")
    return made
