"""Each broken data set is named with its record before a run; good ones are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.finetune.sets import BROKEN, GOOD, SetCase
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import UsageError
from trainwright.finetune.audit import audit_set
from trainwright.finetune.datasets import Chat, Completion, Instruct, Preference, Texts, TokenizedSet

CLASSES: dict[str, type[TokenizedSet]] = {each.use: each for each in (Chat, Instruct, Completion, Preference, Texts)}


def open_case(case: SetCase, folder: Path) -> TokenizedSet:
    path = case.write(folder)
    return CLASSES[case.use](path, tokenizer=make_tokenizer(**case.tokenizer), cache=folder / "cache", **case.options)


def report(case: SetCase, folder: Path) -> list[str]:
    """What a user is told: the error, or the warnings of the audit."""
    try:
        found = audit_set(open_case(case, folder))
    except UsageError as error:
        assert error.remedy
        return [str(error)]
    assert all(each.remedy for each in found.findings)
    return [f"{each.message} -> {each.remedy}" for each in found.warnings]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_set_is_named_with_its_record(case: SetCase, tmp_path: Path) -> None:
    told = report(case, tmp_path)
    assert any(case.says in each and case.place in each for each in told), "\n".join(told) or "silent"


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_good_set_is_silent(case: SetCase, tmp_path: Path) -> None:
    assert report(case, tmp_path) == []


def test_there_are_enough_sets() -> None:
    assert len(BROKEN) >= 40 and len(GOOD) >= 20
