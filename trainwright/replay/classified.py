"""One interface to the losses with one target class per row, for all functions that compute them.

The chunked cross-entropy never holds the scores of all rows. Here they are recomputed from hidden states and head, for
as many rows as are examined.

Shapes: N rows, V classes, D width.
"""

from __future__ import annotations

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

    ``marks`` identify the rows: the scores (N, V), or with ``head`` the hidden states (N, D). Ignored elements of
    ``target`` (N,) are -1 for any ``ignore_index``. ``scores`` reads the current weights of the head: call it during
    the replay or within ``session.live()``.
    """

    name: str
    marks: Tensor
    target: Tensor
    classes: int
    ignore_index: int
    is_sum: bool
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

    def sample(self, most: int) -> Tensor:
        """Returns the indices of at most ``most`` evenly spaced rows."""
        return torch.arange(0, len(self.marks), max(1, -(-len(self.marks) // most)), device=self.marks.device)


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
    return Classified(name, rows.detach(), _marked(target, ignored), int(rows.shape[1]), ignored, is_sum)


def _chunked(args: Args, kwargs: Kwargs) -> Classified:
    hidden, weight, target = args
    ignored = kwargs.get("ignore_index", IGNORE)
    head = Head(weight, kwargs.get("bias_V"), kwargs.get("softcap", 0.0))
    return Classified(CHUNKED, hidden.detach(), _marked(target.detach(), ignored), len(weight), ignored, True, head)


def _marked(target: Tensor, ignored: int) -> Tensor:
    """Returns the targets (N,), with -1 for ignored ones."""
    flat = target.flatten().long()
    return flat.masked_fill(flat == ignored, -1)
