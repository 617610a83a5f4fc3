"""Losses that ask for one class of each row, as one thing, whichever function computes them.

The loss in chunks never has the scores of all rows. They are made from hidden states and head again, for as many rows
as are looked at.

Shapes: N rows, V classes, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.engine.chunked import IGNORE, chunked_cross_entropy
from trainwright.engine.head import Head

CHUNKED = chunked_cross_entropy.__name__
CLASSIFYING = frozenset({"cross_entropy", "nll_loss", CHUNKED})
MOST_SCORES = 1 << 24
"""Elements of the scores that are looked at together."""


@dataclass(frozen=True)
class Classified:
    """A call of such a loss, without graphs, but for ``again``: the same loss of other targets (N,), -1: ignored.

    ``marks`` tell the rows apart: the scores (N, V), or what they are made of with ``head`` (N, D). Of ``target`` (N,)
    those that are ignored are -1, whatever ``ignore_index`` is. Scores that are made again are of the head as it is by
    then: ask for them while the step is replayed, or within ``bench.live()``.
    """

    name: str
    marks: Tensor
    target: Tensor
    classes: int
    ignore_index: int
    is_sum: bool
    again: Callable[[Tensor], Tensor]
    head: Head | None = None

    @property
    def count(self) -> int:
        """Rows that count."""
        return int((self.target >= 0).sum())

    @property
    def most(self) -> int:
        """Rows whose scores may be there together."""
        return max(1, MOST_SCORES // self.classes)

    def scores(self, at: Tensor) -> Tensor:
        """(n, V) of the rows ``at`` (n,), of nll_loss logarithms of probabilities. At most ``most``, or it is large."""
        if self.head is None:
            return self.marks[at]
        weight, bias, cap = self.head.weight.detach(), self.head.bias, self.head.softcap
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            bias = None if bias is None else bias.detach().to(weight.dtype)
            made = F.linear(self.marks[at].to(weight.dtype), weight, bias).float()
        return cap * torch.tanh(made / cap) if cap else made

    def sample(self) -> Tensor:
        """Rows spread over all of them, no more than may be looked at together."""
        return torch.arange(0, len(self.marks), max(1, -(-len(self.marks) // self.most)), device=self.marks.device)

    def pieces(self, at: Tensor | None = None) -> Iterator[Tensor]:
        """All rows, or those ``at``, no more at a time than may be looked at together."""
        rows = torch.arange(len(self.marks), device=self.marks.device) if at is None else at
        yield from torch.split(rows, self.most)

    def loss(self, at: Tensor, target: Tensor) -> float:
        """The mean cross-entropy of the rows ``at`` with the classes that ``target`` (N,) has there; -1: ignored."""
        total, count = 0.0, 0
        for rows in self.pieces(at):
            total += float(F.cross_entropy(self.scores(rows).float(), target[rows], ignore_index=-1, reduction="sum"))
            count += int((target[rows] >= 0).sum())
        return total / count if count else float("nan")


def classified(name: str, args: Any, kwargs: Any) -> Classified | None:
    """A call of a torch function as one of these losses; None for any other, and for targets that are no classes."""
    if name == CHUNKED:
        return _chunked(args, kwargs)
    return _plain(name, args, kwargs) if name in CLASSIFYING else None


def classes_in(name: str, args: Any, kwargs: Any) -> int | None:
    """How many classes a loss tells apart, whatever its targets are; None for a loss of other things."""
    if name not in CLASSIFYING:
        return None
    if name == CHUNKED:
        return len(args[1])
    scores = args[0] if args else kwargs["input"]
    return int(scores.shape[1]) if scores.dim() > 1 else None


def _plain(name: str, args: Any, kwargs: Any) -> Classified | None:
    """(N, V), (V,) or (B, V, T) and so on."""
    given = dict(zip(("input", "target", "weight", "size_average", "ignore_index"), args)) | kwargs
    x, target = given["input"], given["target"].detach()
    if target.is_floating_point() or x.dim() != target.dim() + 1:
        return None
    rows = x.movedim(1, -1).reshape(-1, x.shape[1]) if x.dim() > 1 else x[None]
    ignored, is_sum = given.get("ignore_index", IGNORE), given.get("reduction") == "sum"
    how = "sum" if is_sum else "mean"
    return Classified(
        name, rows.detach(), _marked(target, ignored), int(rows.shape[1]), ignored, is_sum,
        lambda other: F.cross_entropy(rows, other, ignore_index=-1, reduction=how),
    )  # fmt: skip


def _chunked(args: Any, kwargs: Any) -> Classified:
    hidden, weight, target = args
    ignored = kwargs.get("ignore_index", IGNORE)
    return Classified(
        CHUNKED, hidden.detach(), _marked(target.detach(), ignored), len(weight), ignored, True,
        lambda other: chunked_cross_entropy(hidden, weight, other, **{**kwargs, "ignore_index": -1}),
        Head(weight, kwargs.get("bias_V"), kwargs.get("softcap", 0.0)),
    )  # fmt: skip


def _marked(target: Tensor, ignored: int) -> Tensor:
    wanted = target.flatten().long()
    return wanted.masked_fill(wanted == ignored, -1)
