"""``checks new CODE``: writes the files of a new check of the doctor, with its test."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.discovery import all_checks
from trainwright.errors import UsageError, suggest
from trainwright.runs.json_values import JsonValue

_CHECK = '''\
from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.weights import WeightsFacts  # replace it: see doctor/facts

MAX_RATE = 10.0  # the meaning of the limit, and the reason for this number


@check(stage="update", severity="warning", confidence=0.8)
def {name}(run: RunContext, facts: WeightsFacts) -> Results:
    """One sentence of 20 to 130 characters that names the fault in the user's words.

    Why it matters: the effect on the training.

    How it is detected: the compared quantities, the first step of the comparison, and the tolerance with its reason.

    Exceptions: correct programs with similar symptoms, and why the check ignores them. At most three.

    Usual cause: the common mistake in code.

    Looks like: codes of similar checks, and how to distinguish them.

    Fix: one sentence; then code.

        the correct line

    Sources: two independent public reports. Omit a section without content, except for the detection, the cause and
    the fix, which every page has.
    """
    if not facts.updates:
        yield NotApplicable("why the check does not apply to this run")
    elif facts.highest_rate > MAX_RATE:  # replace this condition
        yield run.finding(
            symptom=f"the learning rate is {facts.highest_rate:.3g}",
            evidence=[("the measured quantity", facts.highest_rate, MAX_RATE)],
        )
'''
_TEST = '''\
"""{code} on faulty and on healthy programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loops import CLASSES, WIDTH, alarms, mlp, watched

pytestmark = pytest.mark.slow  # watched loops take more than half a second; what needs none goes without the mark

MODELS = [lambda: nn.Linear(WIDTH, CLASSES), mlp]

CODE = "{code}"


def codes(make: Callable[[], nn.Module], *, faulty: bool) -> list[str]:
    """Train under the watch, with or without the fault; the codes of its warnings."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0 if faulty else 0.1)  # plant the fault here
    return alarms(watched(model, optimizer=optimizer, checks=["default", "{code}"]))


@pytest.mark.parametrize("make", MODELS)
def test_the_fault_is_found(make: Callable[[], nn.Module]) -> None:
    assert "{code}" in codes(make, faulty=True)


@pytest.mark.parametrize("make", MODELS)
def test_a_healthy_program_has_no_finding(make: Callable[[], nn.Module]) -> None:
    assert codes(make, faulty=False) == []
'''


@dataclass(frozen=True)
class NewCheck:
    """The two files of a new check."""

    check: Path
    test: Path

    exit_code = 0

    def lines(self) -> list[str]:
        return [
            f"check  {self.check}",
            f"test   {self.test}",
            f"run    .venv/bin/python -m pytest -n 0 {self.test}",
            "next   docs/concepts/doctor.md, Adding a check",
        ]

    def to_json(self) -> dict[str, JsonValue]:
        return {"check": str(self.check), "test": str(self.test)}


def new_check(code: str, root: Path = Path()) -> NewCheck:
    """Write the files of a new check into the checkout of Trainwright in ``root``.

    Raises UsageError if ``root`` is not a checkout, or the code is not ``topic.name`` with a known topic, or exists.
    """
    topic, _, name = code.partition(".")
    folder = root / "trainwright" / "doctor"
    if not folder.is_dir():
        raise UsageError("a check is a file of Trainwright's source", remedy="run it in a checkout of the repository")
    topics = [each.topic for each in all_checks()]
    if topic not in topics:
        raise UsageError(f"there is no topic {topic!r}", remedy=suggest(topic, topics))
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(f"{code!r} is not a code", remedy=f"write {topic}.what_is_wrong, in lower case")
    tests = root / "tests" / "doctor" / "checks" / topic
    made = NewCheck(folder / "checks" / topic / f"{name}.py", tests / f"test_{name}.py")
    for path in (made.check, made.test):
        if path.exists():
            raise UsageError(f"{path} exists", remedy="take another name")
    for path, text in ((made.check, _CHECK), (made.test, _TEST)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{name}", name).replace("{code}", code), encoding="utf-8")
    return made
