"""A reward function for ``examples/grpo.yaml``: 1 for a completion that contains the answer."""

from __future__ import annotations

Messages = list[dict[str, str]]


def contains_answer(completions: list[Messages], answer: list[object]) -> list[float]:
    """Return a number for each completion; ``answer`` is the key of the records in prompts.jsonl."""
    return [float(str(right) in said[0]["content"]) for said, right in zip(completions, answer, strict=True)]
