"""Each broken data set is named with its record before a run; good ones are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.finetune.sets import BROKEN, GOOD, SetCase, alpaca, lines, pair, said, sharegpt, user, with_one
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import UsageError
from trainwright.finetune.audit import audit_set
from trainwright.finetune.datasets import Chat, Completion, Instruct, Preference, Texts, TokenizedSet

CLASSES: dict[str, type[TokenizedSet]] = {each.use: each for each in (Chat, Instruct, Completion, Preference, Texts)}


def open_case(case: SetCase, folder: Path) -> TokenizedSet:
    path = case.write(folder)
    return CLASSES[case.use](path, tokenizer=make_tokenizer(**case.tokenizer), cache=folder / "cache", **case.options)


def report(case: SetCase, folder: Path) -> list[str]:
    """Return the message for the user: the error, or the warnings of the audit."""
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


def test_nan_may_be_the_right_answer(tmp_path: Path) -> None:
    records = with_one(alpaca, {"instruction": "What is 0/0 in JavaScript?", "input": "", "output": "NaN"})
    case = SetCase("nan", "instruct", lines(records))
    [found] = [each for each in audit_set(open_case(case, tmp_path)).findings if each.name == "placeholder"]
    assert found.severity == "note" and "drop" not in found.remedy


def test_a_conversation_that_begins_with_the_assistant_keeps_its_last_turn(tmp_path: Path) -> None:
    turns = [*sharegpt(2)["conversations"][::-1], *sharegpt(3)["conversations"][::-1]]
    told = report(SetCase("first", "chat", lines(with_one(sharegpt, {"conversations": turns}))), tmp_path)
    assert not any("after the last answer" in each for each in told)


def test_pairs_are_counted_as_pairs(tmp_path: Path) -> None:
    equal = {"prompt": [user(2)], "chosen": [said(2)], "rejected": [said(2)]}
    [told] = report(SetCase("pairs", "preference", lines(with_one(pair, equal))), tmp_path)
    assert told.startswith("1 of 8 pairs (12.5 %) has equal chosen and rejected answers")


def test_one_problem_is_named_once(tmp_path: Path) -> None:
    records = [{"messages": [user(at), {"role": "assistant", "content": None}]} for at in range(12)]
    [told] = report(SetCase("null", "chat", lines(records)), tmp_path)
    assert told.count("no content") == 1 and "12 records" in told
    assert "data.jsonl:1:" in told and "data.jsonl:2, data.jsonl:3, data.jsonl:4 and 8 more" in told


@pytest.mark.parametrize("file", ["data.jsonl", "data.json", "data.csv", "data.parquet"])
def test_a_web_page_is_no_data(file: str, tmp_path: Path) -> None:
    page = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n"
    [told] = report(SetCase("page", "chat", page, file=file), tmp_path)
    assert "is an HTML page with the title '404 Not Found'" in told and "on_bad_record" not in told
