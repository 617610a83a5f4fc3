"""One interface to the losses with one target class per row, for all functions that compute them.

The chunked cross-entropy never holds the scores of all rows. Here they are recomputed from hidden states and head, for
as many rows as are examined.

Shapes: N rows, V classes, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.engine.chunked import IGNORE, chunked_cross_entropy
from trainwright.engine.head import Head
from trainwright.recorder.user_types import Args, Kwargs

CHUNKED = chunked_cross_entropy.__name__
CLASSIFYING = frozenset({"cross_entropy", "nll_loss", CHUNKED})
MAX_SCORES = 1 << 24
"""Maximum number of score elements in memory at once."""


@dataclass(frozen=True)
class Classified:
    """A call of a loss with one class per row. Its tensors have no graph.

    ``again`` computes the loss of the same scores and other targets (N,), with a graph.

    ``marks`` identify the rows: the scores (N, V), or with ``head`` the hidden states (N, D). Ignored elements of
    ``target`` (N,) are -1 for any ``ignore_index``. Scores are computed with the current weights of the head: call
    ``scores`` and ``loss`` during the replay or within ``session.live()``.
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
        """The number of rows that are not ignored."""
        return int((self.target >= 0).sum())

    @property
    def max_rows(self) -> int:
        """The maximum number of rows whose scores are in memory at once."""
        return max(1, MAX_SCORES // self.classes)

    def scores(self, at: Tensor) -> Tensor:
        """Returns the scores (n, V) of the rows ``at`` (n,), n <= ``max_rows``; for nll_loss log-probabilities."""
        if self.head is None:
            return self.marks[at]
        weight, bias, cap = self.head.weight.detach(), self.head.bias, self.head.softcap
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            bias = None if bias is None else bias.detach().to(weight.dtype)
            scores = F.linear(self.marks[at].to(weight.dtype), weight, bias).float()
        return cap * torch.tanh(scores / cap) if cap else scores

    def sample(self) -> Tensor:
        """Returns the indices of at most ``max_rows`` evenly spread rows."""
        return torch.arange(0, len(self.marks), max(1, -(-len(self.marks) // self.max_rows)), device=self.marks.device)

    def pieces(self, at: Tensor | None = None) -> Iterator[Tensor]:
        """Yields the indices of all rows, or those in ``at``, in pieces of at most ``max_rows``."""
        rows = torch.arange(len(self.marks), device=self.marks.device) if at is None else at
        yield from torch.split(rows, self.max_rows)

    def loss(self, at: Tensor, target: Tensor) -> float:
        """Returns the mean cross-entropy of the rows ``at`` with the classes ``target`` (N,). -1 is ignored."""
        total, count = 0.0, 0
        for rows in self.pieces(at):
            total += float(F.cross_entropy(self.scores(rows).float(), target[rows], ignore_index=-1, reduction="sum"))
            count += int((target[rows] >= 0).sum())
        return total / count if count else float("nan")


def classified(name: str, args: Args, kwargs: Kwargs) -> Classified | None:
    """Returns the call of a torch function as one of these losses; None for other functions and for soft targets."""
    if name == CHUNKED:
        return _chunked(args, kwargs)
    return _plain(name, args, kwargs) if name in CLASSIFYING else None


def classes_in(name: str, args: Args, kwargs: Kwargs) -> int | None:
    """Returns the number of classes of a classification loss; None for any other function."""
    if name not in CLASSIFYING:
        return None
    if name == CHUNKED:
        return len(args[1])
    scores = args[0] if args else kwargs["input"]
    return int(scores.shape[1]) if scores.dim() > 1 else None


def _plain(name: str, args: Args, kwargs: Kwargs) -> Classified | None:
    """Handles scores of shape (N, V), (V,), (B, V, T) and so on. Returns None for soft targets."""
    arguments = dict(zip(("input", "target", "weight", "size_average", "ignore_index"), args)) | kwargs
    x, target = arguments["input"], arguments["target"].detach()
    if target.is_floating_point() or x.dim() != target.dim() + 1:
        return None
    rows = x.movedim(1, -1).reshape(-1, x.shape[1]) if x.dim() > 1 else x[None]
    ignored, is_sum = arguments.get("ignore_index", IGNORE), arguments.get("reduction") == "sum"
    reduction = "sum" if is_sum else "mean"
    return Classified(
        name, rows.detach(), _marked(target, ignored), int(rows.shape[1]), ignored, is_sum,
        lambda other: F.cross_entropy(rows, other, ignore_index=-1, reduction=reduction),
    )  # fmt: skip


def _chunked(args: Args, kwargs: Kwargs) -> Classified:
    hidden, weight, target = args
    ignored = kwargs.get("ignore_index", IGNORE)
    return Classified(
        CHUNKED, hidden.detach(), _marked(target.detach(), ignored), len(weight), ignored, True,
        lambda other: chunked_cross_entropy(hidden, weight, other, **{**kwargs, "ignore_index": -1}),
        Head(weight, kwargs.get("bias_V"), kwargs.get("softcap", 0.0)),
    )  # fmt: skip


def _marked(target: Tensor, ignored: int) -> Tensor:
    """Returns the targets (N,), with -1 for ignored ones."""
    flat = target.flatten().long()
    return flat.masked_fill(flat == ignored, -1)
