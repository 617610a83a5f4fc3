"""Answers about a hostile run are limited in size, cleaned of control characters, and have secrets masked."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.agent.untrusted import MAX_TEXT_CHARS, answer, as_text, cleaned

DEEP: Any = "x"
for _ in range(60):
    DEEP = {"k" * 80: DEEP, "other": [DEEP] if isinstance(DEEP, str) else []}


@pytest.mark.parametrize(
    "value",
    [
        {f"key {n}": f"value {n}" for n in range(20_000)},
        {f"key {n}": "v" * 100 for n in range(1500)},
        {f"a{n}": {f"b{m}": {f"c{k}": "v" * 30 for k in range(9)} for m in range(9)} for n in range(9)},
        [[f"{n}" * 50] for n in range(5000)],
        DEEP,
    ],
    ids=["mapping", "texts", "nested", "lists", "deep"],
)
@pytest.mark.parametrize("budget", [400, 8000])
def test_no_answer_is_larger_than_its_budget(value: Any, budget: int) -> None:
    assert len(as_text(answer({"values": value}, budget))) <= budget * 4


def test_a_run_names_no_key_to_escape_cleaning() -> None:
    made = answer({"values": {"lines": "<script>", "page": "P" * 5000}}, 8000)["values"]
    assert "<script" not in made["lines"] and len(made["page"]) <= MAX_TEXT_CHARS
    assert "if a <b:" in str(answer({"lines": ["if a <b:"]}, 800)["lines"])


def test_lists_of_secrets_are_masked() -> None:
    assert "hunter22" not in str(answer({"recipe": {"log.api_key": ["hunter22", "hunter22"]}}, 800))


@pytest.mark.parametrize(
    "hidden", ["\u061c", "\ufe01", "\U000e0101", "\u3164", "\ufff9", "\u180e", "\U000e0041"], ids=ascii
)
def test_characters_that_a_person_does_not_see_are_removed(hidden: str) -> None:
    assert cleaned(f"a{hidden}b") == "ab"


def test_a_text_of_assignments_is_cleaned() -> None:
    assert len(cleaned("a=" * 5000)) <= MAX_TEXT_CHARS
