"""Examines the axes of tensors: views in another order, positions added per row, attention masks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.layers import AxisFacts, Reordered
from trainwright.recorder.callers import caller
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import tensors_of
from trainwright.recorder.tensor_notes import TensorNotes
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.functions import argument

MAX_MASKED_SCORE = -1e4
"""Scores below this value are masked, also in float16."""
MIN_PASSES = 2
"""Minimum number of passes that show a mistake."""
MAX_SITES = 16


class Axes:
    """Observes the functions of training passes. ``begin`` is called before each pass with the model's inputs."""

    def __init__(self) -> None:
        self.samples = 0  # batch size of the newest loader batch, along any axis; 0: unknown
        self._found: Counter[tuple[str, str, str | None, tuple[tuple[int, ...], ...]]] = Counter()
        self._size = 0
        self._padding: Tensor | None = None
        self._rows: TensorNotes[None] = TensorNotes()  # table rows, one for each sample

    def begin(self, args: Args, kwargs: Kwargs) -> None:
        inputs = [each for each in plain(tensors_of((args, kwargs), 3)) if each.dim() > 1]
        shape = inputs[0].shape if inputs else (0, 0)
        self._size = shape[0] if shape[0] == self.samples > 2 and shape[0] != shape[1] else 0
        self._padding = next((pad for each in inputs if (pad := padding_of(each)) is not None), None)
        self._rows.clear()

    def note(self, path: str, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if name in ("view", "reshape") and isinstance(result, Tensor):
            if is_reordered(args[0].shape, result.shape) or is_regrouped(args[0].shape, result.shape, self._size):
                self._add("reordered", path, tuple(args[0].shape), tuple(result.shape))
        elif name in ("embedding", "__getitem__") and self._size and isinstance(result, Tensor):
            self._record_rows(name, args, result)
        elif name in ("softmax", "log_softmax") and self._size and is_over_first(args, kwargs, self._size):
            self._add("over_samples", path, tuple(args[0].shape))
        elif name.strip("_") in ("add", "iadd", "radd") and self._rows:
            self._record_sum(path, [each for each in args if isinstance(each, Tensor)])
        if self._padding is not None and (hidden := hidden_keys(name, args, kwargs)) is not None:
            self._record_mask(path, self._padding, hidden)

    def entered(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """A sequence layer was called. It takes the first axis for time steps unless ``batch_first`` is set."""
        if not self._size or not isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) or module.batch_first:
            return
        x = next(iter(plain(tensors_of((args, kwargs), 2))), None)
        if x is not None and x.dim() == 3 and x.shape[0] == self._size != x.shape[1] > 1:
            self._add("batch_as_steps", path, tuple(x.shape))

    def _add(self, kind: str, path: str, *shapes: tuple[int, ...]) -> None:
        key = (kind, path, caller(), shapes)
        if key in self._found or len(self._found) < MAX_SITES:
            self._found[key] += 1

    def _record_rows(self, name: str, args: Args, result: Tensor) -> None:
        """Records table rows that are indexed by sample: ``position(arange(batch))``, ``pe[:batch]``."""
        if result.dim() not in (2, 3) or result.shape[0] != self._size or (result.dim() == 3 and result.shape[1] != 1):
            return
        if name == "embedding":
            ids = next((each for each in args if isinstance(each, Tensor) and not each.is_floating_point()), None)
            is_numbered = ids is not None and torch.equal(ids.flatten(), torch.arange(self._size, device=ids.device))
        else:
            table = args[0]
            is_numbered = table.is_leaf and result.data_ptr() == table.data_ptr() and len(table) > self._size
        if is_numbered:
            self._rows[result] = None

    def _record_sum(self, path: str, pair: Sequence[Tensor]) -> None:
        rows = next((each for each in pair if each in self._rows), None)
        others = [each for each in pair if each is not rows]
        if rows is not None and others and others[0].dim() == 3 and rows.dim() == 3:
            x = others[0]
            if x.shape[0] == self._size and x.shape[1] > 1 and x.shape[2] == rows.shape[2]:
                self._add("numbered", path, tuple(rows.shape), tuple(x.shape))

    def _record_mask(self, path: str, padding: Tensor, hidden: Tensor) -> None:
        """Records a mask that hides exactly the keys without padding."""
        if hidden.shape == padding.shape:
            rows = padding.any(1)
            if torch.equal(hidden[rows], ~padding[rows]):
                self._add("inverted", path, tuple(hidden.shape))

    def facts(self) -> AxisFacts:
        found: dict[str, list[Reordered]] = defaultdict(list)
        for (kind, path, line, shapes), times in self._found.items():
            if times >= MIN_PASSES:
                found[kind].append(Reordered(module=path, line=line, shapes=shapes))
        return AxisFacts(**{kind: tuple(each[:4]) for kind, each in found.items()})


def is_reordered(old: Sequence[int], new: Sequence[int]) -> bool:
    """Returns True if the last axes have the same sizes in another order: a view mixes up their values.

    Sizes that differ by 1 are left out: relative attention shifts by viewing (T, T + 1) as (T + 1, T).
    """
    before, after = ([size for size in each if size != 1] for each in (old, new))
    for count in (2, 3):
        one, other = before[-count:], after[-count:]
        if len(one) == len(other) == count and one != other and sorted(one) == sorted(other):
            moved = sorted({size for size, now in zip(one, other) if size != now})
            return all(b - a > 1 for a, b in pairwise(moved))
    return False


def is_regrouped(old: Sequence[int], new: Sequence[int], size: int) -> bool:
    """Returns True if the samples become the first axis: (n, samples, ...) to (samples, ...)."""
    was_inside = len(old) > 1 and 1 < old[0] < size and list(old[1:]).count(size) == 1
    return was_inside and new[0] == size and list(new).count(size) == 1


def is_over_first(args: Args, kwargs: Kwargs, size: int) -> bool:
    """Returns True if a softmax runs over the samples of the batch."""
    x, dim = args[0], argument(args, kwargs, 1, "dim", None)
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or x.shape[0] != size or list(x.shape).count(size) != 1:
        return False
    dim = (0 if x.dim() == 3 else 1) if dim is None else dim
    return dim in (0, -x.dim()) and x.shape[-1] > 1


def padding_of(ids: Tensor) -> Tensor | None:
    """Returns the padding positions of token ids: at one end and of several lengths; None without padding."""
    if ids.dim() != 2 or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() or ids.shape[1] < 4:
        return None
    for end in (ids.flip(1), ids):
        is_filler = (end == end[:, 0].mode().values).long().cumprod(1).bool()
        lengths = is_filler.sum(1)
        if int((lengths >= 2).sum()) >= 2 and int(lengths.min()) < int(lengths.max()) < ids.shape[1]:
            return is_filler.flip(1) if end is not ids else is_filler
    return None


def hidden_keys(name: str, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Returns the keys that attention hides from all queries of a row, of shape (batch, keys)."""
    if name == "multi_head_attention_forward":
        mask, is_shown = kwargs.get("key_padding_mask"), False
    elif name == "scaled_dot_product_attention":
        mask, is_shown = argument(args, kwargs, 3, "attn_mask", None), True
    elif name == "softmax" and isinstance(args[0], Tensor) and args[0].dim() > 2:
        mask, is_shown = args[0].detach(), False
    else:
        return None
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return None
    hidden = (~mask if is_shown else mask) if mask.dtype == torch.bool else mask <= MAX_MASKED_SCORE
    return hidden.flatten(1, -2).all(1) if hidden.dim() > 2 else hidden
