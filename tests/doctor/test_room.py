"""A comparison with targets is learned beside the other terms of the loss: measured, with it alone, on a replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.doctor.law_loops import Loop, found, states, watched

Loss = Callable[[Tensor, Tensor], Tensor]


def confidence(logits: Tensor) -> Tensor:
    return (logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def of_scores(logits: Tensor, y: Tensor) -> Tensor:
    """The size of the scores lies on another scale: a large weight makes it as large as the rest."""
    return F.cross_entropy(logits, y) + 20.0 * (logits * 1e-2).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "state"),
    [
        (F.cross_entropy, "not applicable"),
        (lambda logits, y: F.cross_entropy(logits, y) + 0.05 * confidence(logits), "not applicable"),
        (lambda logits, y: F.cross_entropy(logits, y) + 50.0 * confidence(logits), "broken"),
        (lambda logits, y: F.cross_entropy(logits, y) + 100.0 * logits.square().mean(), "broken"),
        (of_scores, "held"),
    ],
    ids=["alone", "a bonus", "a bonus times 1000", "a penalty times 1000", "a large weight of something small"],
)
def test_what_is_learned_beside_a_term_with_a_large_weight(loss: Loss, state: str) -> None:
    def with_it(loop: Loop) -> None:
        loop.loss = loss

    watch = watched(with_it, steps=96)
    assert states(watch, "loss")["terms_leave_room"].state == state
    if state == "broken":
        finding = found(watch, "law.loss.terms_leave_room")
        assert finding.severity == "warning" and "cross_entropy is" in finding.symptom
