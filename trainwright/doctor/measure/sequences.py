"""Examines whether outputs depend on padding."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.doctor.facts.function import Deviation
from trainwright.doctor.measure.eval_passes import EvalPasses, max_distance
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import InputHandler, change_leaves, function_name
from trainwright.replay.replayer import Intervention

COMPARISONS = frozenset({"eq", "ne", "gt", "lt", "not_equal"})
MIN_LENGTH = 4
"""Minimum length of a sequence."""


def padding(passes: EvalPasses) -> tuple[Deviation | None, str]:
    """Returns the deviation of a row's outputs without its padding, and the declaration that identifies padding."""
    for ids in passes.session.inputs:
        place = _padded_row(ids)
        if place is None:
            continue
        row, length, filler = place
        rows = [row, row]
        try:
            whole = passes.run(Intervention(rows=rows))
            cut = passes.run(Intervention(rows=rows, inputs=_cut(int(ids.shape[1]), length)))
        except Exception:
            continue  # the model requires this length
        pairs = [pair for a, b in zip(whole, cut) if (pair := _common(a, b, int(ids.shape[1]), length)) is not None]
        if pairs:
            amount = max_distance([a for a, _ in pairs], [b for _, b in pairs])
            return Deviation(amount, passes.limit), _declared(passes, ids, filler)
    return None, ""


def _padded_row(ids: Tensor) -> tuple[int, int, int] | None:
    """Returns the row with the most padding, its length without padding, and the padding value; None without padding.

    Floating-point inputs are padded with zeros, token ids with the id that most rows end in.
    """
    if (
        ids.dtype == torch.bool
        or ids.dim() < 2
        or ids.shape[1] < MIN_LENGTH
        or ids.is_floating_point() != (ids.dim() > 2)
    ):
        return None
    filler = 0 if ids.is_floating_point() else int(ids[:, -1].mode().values)
    is_filler = (ids == filler).flatten(2).all(2) if ids.dim() > 2 else ids == filler
    runs = is_filler.flip(1).cumprod(1).sum(1)
    kept = int(ids.shape[1]) - runs
    if int((runs >= 2).sum()) < 2 or int(runs.min()) == int(runs.max()):
        return None
    row = int(torch.where(kept >= 2, runs, 0).argmax())
    return (row, int(kept[row]), filler) if int(runs[row]) >= 2 and int(kept[row]) >= 2 else None


def _cut(length: int, kept: int) -> InputHandler:
    """Returns a handler that cuts every (rows, length, ...) tensor after ``kept`` if only one value follows."""

    def change(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[1] != length:
            return leaf
        tail = leaf[:, kept:]
        return leaf[:, :kept] if bool((tail == tail[:1, :1]).all()) else leaf

    return change_leaves(change)


def _common(whole: Tensor, cut: Tensor, length: int, kept: int) -> tuple[Tensor, Tensor] | None:
    """Returns the common part of two outputs: all of them, or the positions without padding."""
    if whole.shape == cut.shape:
        return whole, cut
    dims = [n for n, (a, b) in enumerate(zip(whole.shape, cut.shape)) if (a, b) == (length, kept)]
    short = whole.narrow(dims[0], 0, kept) if len(dims) == 1 else whole
    return (short, cut) if short.shape == cut.shape else None


def _declared(passes: EvalPasses, ids: Tensor, filler: int) -> str:
    """Returns the part of the model or input that declares padding; "" without one.

    A zero vector for padding (``padding_idx``) or targets without padding are no declaration. They are also usual where
    the model uses padding: convolutions with a maximum, a mean, a recurrent layer.
    """
    if ids.is_floating_point():
        kept = int(ids.shape[1]) - (ids == 0).flatten(2).all(2).flip(1).cumprod(1).sum(1)
        lengths = [x for x in passes.session.inputs if x.shape == kept.shape and not x.is_floating_point()]
        return "lengths among the inputs" if any(bool((x.to(kept) >= kept).all()) for x in lengths) else ""
    masks = [x for x in passes.session.inputs if x is not ids and x.shape == ids.shape]
    if any(int(((x != 0) != (ids != filler)).sum()) in (0, ids.numel()) for x in masks):
        return "a mask among the inputs"
    return "a mask that the model makes" if _is_compared(passes, ids, filler) else ""


def _is_compared(passes: EvalPasses, ids: Tensor, filler: int) -> bool:
    """Returns True if an operation compares the ids with the padding id."""
    found: list[bool] = []

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function).strip("_") in COMPARISONS and len(args) > 1 and isinstance(args[0], Tensor):
            is_it = isinstance(args[1], int | float) and args[1] == filler and args[0].shape == ids.shape
            found.append(is_it and torch.equal(args[0].to(ids), ids))
        return function(*args, **kwargs)

    passes.run(Intervention(ops=call))
    return any(found)
