"""The input of a sample, without its target."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainwright.commands.bad_cases.find import shown_sample


@pytest.mark.parametrize(
    ("sample", "kind", "text"),
    [
        ([5, 6, 7], "text", "5 6 7"),
        ([torch.tensor([5, 6, 7]), 1], "text", "5 6 7"),
        ((torch.tensor([5, 6, 7]), torch.tensor(1)), "text", "5 6 7"),
    ],
    ids=["a list of ids", "a list with a target", "a tuple with a target"],
)
def test_all_of_the_input_is_shown(sample: Any, kind: str, text: str) -> None:
    shown = shown_sample(sample, [], side=8)
    assert (shown.kind, shown.text) == (kind, text)
