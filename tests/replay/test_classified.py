"""A loss in chunks and a plain one look the same to whoever asks, and of the former never all scores are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.engine.chunked import chunked_cross_entropy
from trainwright.replay import classified as module
from trainwright.replay.classified import CHUNKED, Classified, classes_in, classified

N, D, V, MOST = 60, 8, 11, 7


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SCORES", MOST * V)
    torch.manual_seed(0)


class Sizes(TorchDispatchMode):
    """The elements of the largest tensor that an operator made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.largest = max(self.largest, out.numel())
        return out


def both(ignored: int = -100, softcap: float = 0.0) -> tuple[Classified, Classified, Tensor]:
    """The same loss in chunks and plain, and its logits."""
    hidden, weight, bias = torch.randn(N, D, requires_grad=True), torch.randn(V, D), torch.randn(V)
    target = torch.randint(V, (N,))
    target[::4] = ignored
    logits = F.linear(hidden, weight, bias)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    options = {"bias_V": bias, "ignore_index": ignored, "softcap": softcap}
    parts = classified(CHUNKED, (hidden, weight, target), options)
    whole = classified("cross_entropy", (logits, target), {"ignore_index": ignored, "reduction": "sum"})
    assert parts is not None and whole is not None
    return parts, whole, logits.detach()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_both_say_the_same(ignored: int, softcap: float) -> None:
    parts, whole, logits = both(ignored, softcap)
    assert (parts.classes, parts.ignore_index, parts.is_sum) == (whole.classes, whole.ignore_index, whole.is_sum)
    assert torch.equal(parts.target, whole.target)
    assert parts.count == whole.count == int((parts.target >= 0).sum()) < N
    rows = torch.tensor([3, 50, 3])
    torch.testing.assert_close(parts.scores(rows), logits[rows])
    assert torch.equal(whole.scores(rows), logits[rows])


def test_no_more_scores_than_asked_for() -> None:
    parts, _, _ = both()
    with Sizes() as sizes:
        parts.scores(torch.arange(MOST))
    assert sizes.largest == V * D < N * V, "the weight itself"


def test_layouts_of_torch_and_what_is_none() -> None:
    scores, target = torch.randn(4, V, 5), torch.randint(V, (4, 5))
    one = classified("nll_loss", (), {"input": scores, "target": target})
    assert one is not None
    assert one.scores(torch.tensor([7])).tolist() == [scores[1, :, 2].tolist()]
    assert int(one.target[7]) == int(target[1, 2])
    soft = torch.randn(4, V, 5).softmax(1)
    assert classified("cross_entropy", (scores, soft), {}) is None
    assert classes_in("cross_entropy", (scores, soft), {}) == V
    assert classified("mse_loss", (scores, scores), {}) is None is classes_in("mse_loss", (scores, scores), {})
    assert chunked_cross_entropy.__name__ == CHUNKED
