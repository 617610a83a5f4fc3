"""The doctor's checks as a whole: each has a page, and what they find is folded, ranked and explained."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from trainwright.doctor.check import Check, CheckState, NotApplicable, Result
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.discovery import all_checks, choose_checks
from trainwright.doctor.facts.reference import ReferenceFacts
from trainwright.doctor.measure import LISTENERS, LIVE_LOOP_LISTENERS, REPLAYS
from trainwright.doctor.pages import codes, page, title
from trainwright.doctor.remedies import TRIALS
from trainwright.errors import UsageError
from trainwright.runs.findings import rank
from trainwright.runs.records import Examined, Watched, Where

ROOT = Path(__file__).parents[2]
CODES = {each.code for each in all_checks()}
TOPICS = {each.topic for each in all_checks()}


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.code)
def test_the_page_of_a_check_is_whole(check: Check) -> None:
    text = page(check.code)
    assert {"How it is detected", "Usual cause", "Fix"} <= set(check.page.sections)
    assert all(check.page.sections.values()), "an empty section"
    assert 20 <= len(check.page.title) <= 130 and check.page.title.endswith(".")
    assert text.count("`") % 2 == 0
    assert max(map(len, text.splitlines())) <= 120
    unknown = [each for each in check.explains if each not in CODES and each.removesuffix(".*") not in TOPICS]
    named = re.findall(r"\b([a-z]+\.[a-z_]{3,})\b", check.page.sections.get("Looks like", ""))
    assert all(each in text for each in named), "a code begins with a capital letter"
    unknown += [each for each in named if each.partition(".")[0] in TOPICS and each not in CODES]
    assert unknown == []


def test_every_trial_that_a_check_names_exists_and_every_trial_is_named() -> None:
    text = "".join(path.read_text() for path in (ROOT / "trainwright" / "doctor").rglob("*.py"))
    named = set(re.findall(r'RemedyTrial\(\s*"(\w+)"', text)) | set(re.findall(r'guard="(\w+)"', text))
    assert named - set(TRIALS) == set()
    assert [name for name in TRIALS if not re.search(rf'(?<!def )"{name}"(?!: RegisteredTrial)', text)] == []


def test_every_measurement_that_a_check_needs_is_made() -> None:
    made = {each.name for each in REPLAYS} | {getattr(each, "name", "") for each in (*LISTENERS, *LIVE_LOOP_LISTENERS)}
    text = "".join(path.read_text() for path in (ROOT / "trainwright" / "doctor" / "measure").rglob("*.py"))
    made |= set(re.findall(r"\b(\w+Facts|\w+Nonfinite)\b", text))
    needed = {kind for each in all_checks() for kind in each.needs} - {ReferenceFacts}  # see tw.watch(like=)
    assert [kind for kind in needed if kind.experiment not in made and kind.__name__ not in made] == []


@dataclass(frozen=True)
class Heat:
    experiment: ClassVar[str] = "heat"
    degrees: float = 0.0


def hot(run: RunContext, facts: Heat) -> Iterator[Result]:
    """It is hot.

    How it is detected: degrees. Usual cause: fire. Fix: water.
    """
    if facts.degrees < 0:
        yield NotApplicable("there is ice")
    elif facts.degrees >= 30:
        yield run.finding(3, symptom="it is hot", where=Where(module="oven"))


def slow(run: RunContext) -> Iterator[Result]:
    """It is slow."""
    yield run.finding(2, symptom="it is slow")


def broken(run: RunContext) -> Iterator[Result]:
    """It fails."""
    yield NotApplicable(str(1 / 0))


HOT = Check("test.hot", hot, "loop", "warning", 0.6, explains=("test.slow",))
SLOW = Check("test.slow", slow, "loop", "warning", 0.9, names_cause=False)


def measured(degrees: float) -> RunContext:
    return RunContext([Examined(time_s=0.0, step=3, experiment="heat", values={"degrees": degrees})])


@pytest.mark.parametrize(
    ("run", "state"),
    [
        (RunContext([]), CheckState("test.hot", "not examined", "it was not measured")),
        (measured(-1.0), CheckState("test.hot", "not applicable", "there is ice")),
        (measured(20.0), CheckState("test.hot", "passed", "")),
        (measured(90.0), CheckState("test.hot", "found", "it is hot")),
    ],
)
def test_the_state_of_a_check_says_why(run: RunContext, state: CheckState) -> None:
    assert diagnose(run, [HOT]).checks == (state,)


def test_a_check_that_raises_is_reported_and_finds_nothing() -> None:
    diagnosis = diagnose(RunContext([]), [Check("test.broken", broken, "loop", "warning", 0.9), SLOW])
    assert [each.found.code for each in diagnosis.findings] == ["test.slow", "doctor.failed"]
    assert [each.state for each in diagnosis.checks] == ["not examined", "found"]


def test_a_cause_takes_in_its_consequences() -> None:
    [found] = diagnose(measured(90.0), [SLOW, HOT]).findings
    assert found.found.code == "test.hot"
    assert found.found.consequences == ("test.slow: it is slow",)


def test_causes_are_ranked_before_what_is_only_seen() -> None:
    alone = Check("test.hot", hot, "loop", "warning", 0.6)
    found = [each.found for each in diagnose(measured(90.0), [SLOW, alone]).findings]
    assert [each.code for each in found] == ["test.hot", "test.slow"], "though its confidence is lower"
    assert sorted(found, key=rank) == found


def test_a_finding_points_at_the_line_of_its_call() -> None:
    calls = [["backward", "train.py:7"], ["step", "train.py:8"], ["step", "train.py:9"]]
    steps = [Watched(time_s=0.0, step=at, loss=1.0, grad_norm=1.0, lr=0.1, values=values)
             for at, values in ((1, {"lines": calls}), (2, {}))]  # fmt: skip
    lines = {}
    for kind in ("backward", "step", "clip"):
        [found] = diagnose(
            RunContext(steps), [Check("test.slow", slow, "loop", "warning", 0.9, points_at=(kind,))]
        ).findings
        lines[kind] = found.found.where.source
    assert lines == {"backward": "train.py:7", "step": None, "clip": None}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["default"], set(CODES)),
        (["ranks"], {code for code in CODES if code.startswith("ranks.")}),
        (["loss.wrong_sign", "ranks.stalled"], {"loss.wrong_sign", "ranks.stalled"}),
        ([], set()),
    ],
)
def test_checks_are_chosen_by_code_and_topic(names: list[str], chosen: set[str]) -> None:
    assert {each.code for each in choose_checks(names)} == chosen


@pytest.mark.parametrize("topic", ["loss", "loss.", "loss.*"])
def test_a_topic_lists_its_codes(topic: str) -> None:
    lines = page(topic).splitlines()
    assert [line.split()[0] for line in lines] == [code for code in codes() if code.startswith("loss.")]
    assert [line.split(maxsplit=1)[1] for line in lines] == [title(line.split()[0]) for line in lines]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("loss.sofmax_before_cross_entropi", "'loss.softmax_before_cross_entropy'"),
        ("precision.zzz", "precision."),
        ("qqq", "data., "),
        ("../data", "'data.'"),
    ],
)
def test_an_unknown_code_gets_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match="there is no page for") as caught:
        page(wrong)
    assert right in caught.value.remedy
    with pytest.raises(UsageError, match="there is no check"):
        choose_checks([wrong])


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("missing_zero_grad", "optim.missing_zero_grad"),
        ("softmax cross_entropy", "loss.softmax_before_cross_entropy"),
        ("Gradient NaN", "gradient.clip_spreads_nan"),
        ("checkpoint average", "checkpoint.average_not_restored"),
    ],
)
def test_words_find_the_codes_whose_pages_contain_them(words: str, first: str) -> None:
    found = page(words).splitlines()
    assert found[0].split()[0] == first and all("  " in line for line in found)
    assert len(found) < len(page("").splitlines()) / 4


@pytest.mark.process
def test_checks_need_no_torch() -> None:
    program = (
        "import sys; from trainwright.doctor.pages import page; from trainwright.doctor.diagnose import diagnose\n"
        "from trainwright.doctor.context import RunContext\n"
        "page('loss.'); diagnose(RunContext([])); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
