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


# needs=SomeFacts: it is not made without them. docs/doctor.md, "Adding a check", shows how to see what is measured.
@check(stage="loop", severity="warning", confidence=0.8)
def {name}(run: RunContext) -> Iterator[Result]:
    """One sentence of 20 to 130 characters that says what is wrong, in the user's words.

    Why it matters: what it does to the training.

    How it is detected: what is compared with what, from which step on, and the tolerance with its reason.

    Exceptions: correct programs that look like it, and why the check is silent on them.

    Usual cause: what people write by mistake.

    Looks like: topic.name of other checks, and how to tell them apart. Leave out a section with nothing to say.

    Fix: one sentence; then code.

        the line that is right

    Sources: two independent public reports, as pytorch/pytorch#18014.
    """
    if not run.steps:  # replace these conditions; facts = run.latest(SomeFacts) is what an instrument measured last
        yield NotApplicable("no step was recorded")
        return
    wrong = [each for each in run.steps if each.loss != each.loss]
    if not wrong:
        yield Passed(f"{len(run.steps)} steps")
        return
    yield run.finding(
        wrong[0].step,
        symptom=f"the loss of {len(wrong)} steps is NaN",  # what is wrong in this run, with numbers
        evidence=[("steps with a loss of NaN", len(wrong), 0)],
    )
'''
_TEST = '''\
"""{code} on faulty and on healthy programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainwright as tw

pytestmark = pytest.mark.slow
CODE = "{code}"


def codes(model: nn.Module, steps: int = 8, *, faulty: bool) -> list[str]:
    """Train under the watch, with or without the fault; the codes of its warnings."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:  # "all": with replays
        for _ in range(steps):
            x = torch.randn(16, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            if faulty:
                loss = loss * float("nan")  # plant the fault here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert watch.session.failures == []
    return [found.code for found in watch.findings() if found.severity != "info"]


@pytest.mark.parametrize("model", [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))])
def test_the_fault_is_found(model: nn.Module) -> None:
    assert CODE in codes(model, faulty=True)


@pytest.mark.parametrize("model", [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))])
def test_a_healthy_program_has_no_finding(model: nn.Module) -> None:  # add correct programs that look like the fault
    assert CODE not in codes(model, faulty=False)
'''


@dataclass(frozen=True)
class NewCheck:
    """The two files."""

    check: Path
    test: Path

    exit_code = 0

    def lines(self) -> list[str]:
        """For a person."""
        return [f"check  {self.check}", f"test   {self.test}", f"run    python -m pytest -n 0 {self.test}"]

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
