"""Where a model is wrong, in words: a heading says how many samples its list has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.report_pages.runs import ended, make_run, started, step
from trainwright.report.bad_cases import NAME, BadCase, BadCases
from trainwright.report.pages.report import write_report


def cases(likely: int, others: int, unlisted: int = 0) -> BadCases:
    """``unlisted``: how many more labels are likely wrong than are listed."""
    labels = tuple(BadCase(n, 1.0, label="1", predicted="2", likely=n < likely) for n in range(likely + others))
    return BadCases("val", 100, 1.0, likely_wrong=likely + unlisted, labels=labels)


def section(likely: int, others: int, unlisted: int = 0) -> list[str]:
    """The lines about labels."""
    return cases(likely, others, unlisted).lines()[1:]


@pytest.mark.parametrize(
    ("likely", "others", "expected"),
    [
        (2, 3, {"labels that are likely wrong: 2": 2, "not likely wrong, and next in order": 3}),
        (2, 0, {"labels that are likely wrong: 2": 2}),
        (0, 3, {"no label is likely wrong; these come first": 3}),
        (0, 0, {}),
    ],
)
def test_labels_that_are_called_wrong_are_listed_apart(likely: int, others: int, expected: dict[str, int]) -> None:
    found: dict[str, int] = {}
    for line in section(likely, others):
        if line.startswith("  "):
            found[list(found)[-1]] += 1
        else:
            found[line] = 0
    assert found == expected


def test_a_heading_says_how_many_of_the_labels_are_listed() -> None:
    assert section(2, 0, unlisted=118)[0] == "labels that are likely wrong: 120, the first 2 of them"


@pytest.mark.parametrize(
    ("unlisted", "counts"),
    [
        (0, {"Labels that are likely wrong": "2", "Other labels, by how likely they are wrong": "3"}),
        (118, {"Labels that are likely wrong": "2 of 120", "Other labels, by how likely they are wrong": "3"}),
    ],
    ids=["all are listed", "the first are listed"],
)
def test_the_page_counts_what_it_lists(tmp_path: Path, unlisted: int, counts: dict[str, str]) -> None:
    run = make_run(tmp_path, "run", [started(), step(1), ended(1)]).path
    (run / NAME).write_text(json.dumps(cases(2, 3, unlisted).to_json()))
    page = write_report([run]).path.read_text()
    found = re.findall(r'<summary>([^<]*abels[^<]*) <span class="count">([^<]*)</span>', page)
    assert dict(found) == counts
    assert page.count('class="sample likely"') == 2 and page.count('class="sample"') == 3
