"""Cuts a micro-batch into smaller ones along its samples, exactly, or raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.errors import UsageError

_PLAIN = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))
Piece = Callable[[slice], object]
"""Returns the samples in a slice of its data."""


def cut(batch: StepBatch, limit: int | None) -> StepBatch:
    """Return the same samples in the same order, in micro-batches of at most ``limit``; views, no copies.

    Raises UsageError if the data have no row for each sample, with the path of the obstacle.
    """
    if limit is None or all(micro.size <= limit for micro in batch.micro):
        return batch
    return replace(batch, micro=tuple(piece for micro in batch.micro for piece in cut_micro(micro, limit)))


def cut_micro(micro: MicroBatch, limit: int) -> list[MicroBatch]:
    """Return one micro-batch in pieces of ``limit`` samples; the last piece may be smaller."""
    size = micro.size
    if size <= limit:
        return [micro]
    piece = _piece_of(micro.data, size, "batch")
    if piece is None:
        raise _cannot_cut("nothing in it has a row for each sample", size)
    rows = [slice(start, min(start + limit, size)) for start in range(0, size, limit)]
    return [MicroBatch(piece(some), micro.ids[some]) for some in rows]


def rows_of_rank(micro: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """Return the rows of ``rank``, divided evenly. A rank without rows gets the first row without its id, at weight 0.

    Raises UsageError as ``cut`` does.
    """
    if ranks == 1:
        return micro
    piece = _piece_of(micro.data, micro.size, "batch")
    if piece is None:
        raise _cannot_cut("nothing in it has a row for each sample", micro.size)
    ids = np.array_split(micro.ids, ranks)
    begin = sum(map(len, ids[:rank]))
    rows = slice(begin, begin + len(ids[rank])) if len(ids[rank]) else slice(0, 1)
    return MicroBatch(piece(rows), ids[rank])


def _piece_of(data: object, size: int, path: str) -> Piece | None:
    """Return a function that slices samples out of ``data``; None for values that apply to all samples, such as a
    number.

    Raises UsageError for a tensor with another first dimension, or for an unknown type.
    """
    if isinstance(data, Tensor) and data.layout != torch.strided:
        raise _cannot_cut(f"{path} is {data.layout}", size)
    if isinstance(data, Tensor | np.ndarray) and data.ndim:
        if data.shape[0] != size:
            raise _cannot_cut(f"{path} has the shape {tuple(data.shape)}", size)
        return data.__getitem__
    if isinstance(data, Mapping):
        pieces = {key: _piece_of(value, size, f"{path}[{key!r}]") for key, value in data.items()}
        if not any(pieces.values()):
            return None
        return lambda rows: _as_class_of(data, {k: _slice_part(pieces[k], v, rows) for k, v in data.items()})
    if isinstance(data, tuple | list):
        return _piece_of_several(data, size, path)
    if isinstance(data, _PLAIN):
        return None
    raise _cannot_cut(f"{path} is a {type(data).__name__}", size)


def _piece_of_several(data: tuple[object, ...] | list[object], size: int, path: str) -> Piece | None:
    """Return the slicing function of a container, which holds either the parts of a batch or the samples themselves.

    If both are possible, a top-level tuple holds parts. A top-level list holds samples if every item, read as
    a part, would be a list or tuple of samples. Deeper ambiguity raises UsageError.
    """
    pieces: list[Piece | None] = []
    refusal = None
    for i, value in enumerate(data):
        try:
            pieces.append(_piece_of(value, size, f"{path}[{i}]"))
        except UsageError as error:
            refusal = refusal or error
    has_rows = any(pieces)
    if len(data) == size and len({type(value) for value in data}) == 1:
        if not has_rows or (path == "batch" and type(data) is list and all(map(_takes_samples, pieces))):
            return data.__getitem__
        if path != "batch":
            raise _cannot_cut(f"{path} may hold {size} samples, or {size} tensors with a row for each of them", size)
    if refusal is not None:
        raise refusal
    if not has_rows:
        return None
    make: Callable[[Iterable[object]], object] = getattr(type(data), "_make", type(data))
    return lambda rows: make(_slice_part(piece, value, rows) for piece, value in zip(pieces, data, strict=True))


def _as_class_of(data: Mapping[object, object], made: dict[object, object]) -> object:
    """Return ``made`` as an instance of the class of ``data``, or as a plain dict if that class cannot be built so."""
    try:
        return made if type(data) is dict else type(data)(made)  # type: ignore[call-arg]
    except TypeError:  # such as a defaultdict
        return made


def _takes_samples(piece: Piece | None) -> bool:
    return isinstance(getattr(piece, "__self__", None), tuple | list)


def _slice_part(piece: Piece | None, value: object, rows: slice) -> object:
    return value if piece is None else piece(rows)


def _cannot_cut(why: str, size: int) -> UsageError:
    return UsageError(
        f"a micro-batch of {size} samples cannot be cut: {why}",
        remedy="give tensors whose first dimension counts the samples, or make batch.micro smaller",
    )
