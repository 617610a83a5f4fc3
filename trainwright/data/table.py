"""Tables: columns of numbers that are inputs, and one that is the target."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from trainwright.errors import UsageError, import_optional, suggest_file

Frame: TypeAlias = Any
"""A pandas or polars DataFrame, a pyarrow Table, or a mapping from names to columns."""


class Table(TensorDataset):
    """Rows of (inputs float32 (C,), target); C is the number of input columns.

    ``labels`` are the classes of a target of strings, by code; ``inputs`` are the names of the columns.
    """

    def __init__(
        self, inputs_NC: Tensor, target_N: Tensor, labels: tuple[str, ...] = (), inputs: tuple[str, ...] = ()
    ) -> None:
        super().__init__(inputs_NC, target_N)
        self.labels, self.inputs = labels, inputs
        if not target_N.is_floating_point():
            self.classes = len(labels) or int(target_N.max()) + 1


def table(source: Frame | str | Path, *, inputs: Sequence[str], target: str) -> Table:
    """Make a dataset from a table, or from a .csv, .parquet, .feather or .arrow file.

    Args:
        source: The file, or in Python a table of pandas or pyarrow or a dict of columns.
        inputs: Names of the numeric input columns; they become float32.
        target: Name of the target column. Integers and strings become int64, strings numbered in sorted order; any
            other target becomes float32.

    Raises UsageError for a column that is missing or not numeric, MissingExtra without pyarrow.
    """
    frame = _read(Path(source).expanduser()) if isinstance(source, str | Path) else source
    if isinstance(inputs, str):
        raise UsageError("inputs is one text", remedy=f"give a list of columns: inputs=[{inputs!r}]")
    columns = [_numbers(_column(frame, name), name) for name in inputs]
    if not columns:
        raise UsageError("a table without inputs", remedy="name the columns: inputs=['a', 'b']")
    codes, labels = _target(_column(frame, target), target)
    if not len(codes):
        raise UsageError("the table has no rows", remedy="check where it is read from")
    return Table(torch.from_numpy(np.stack(columns, 1)), torch.from_numpy(codes), labels, tuple(inputs))


def _column(frame: Frame, name: str) -> NDArray[Any]:
    try:
        column = frame[name]
    except Exception:
        names = getattr(frame, "column_names", None) or getattr(frame, "columns", None)
        names = frame.keys() if names is None else names
        raise UsageError(f"the table has no column {name!r}", remedy=f"it has {', '.join(map(str, names))}") from None
    return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)


def _numbers(column: NDArray[Any], name: str) -> NDArray[np.float32]:
    if column.dtype.kind in "mM":
        raise UsageError(
            f"the column {name!r} holds times ({column.dtype}), and float32 cannot tell neighbours apart",
            remedy="give numbers that matter, such as the hour, or the seconds since the first row",
        )
    try:
        numbers = column.astype(np.float32)
    except (TypeError, ValueError):
        raise UsageError(
            f"the column {name!r} holds {column.dtype}, no numbers", remedy="give codes, or one column for each value"
        ) from None
    if missing := int(np.isnan(numbers).sum()):
        raise UsageError(
            f"{missing} of {len(numbers)} values of the column {name!r} are missing", remedy="fill or drop those rows"
        )
    return numbers


def _target(column: NDArray[Any], name: str) -> tuple[NDArray[Any], tuple[str, ...]]:
    if column.dtype.kind in "iub":
        return column.astype(np.int64), ()
    if column.dtype.kind == "f":
        return _numbers(column, name), ()
    if not all(isinstance(each, str) for each in column.tolist()):
        raise UsageError(f"the target {name!r} holds {column.dtype}", remedy="give numbers or words in each row")
    words, codes = np.unique(column.astype(str), return_inverse=True)
    return codes.astype(np.int64), tuple(words.tolist())


def _read(path: Path) -> Frame:
    try:
        if path.suffix == ".csv":
            return _csv(path)
        with path.open("rb"):
            pass
    except OSError as error:
        remedy = suggest_file(path, "a table")
        raise UsageError(f"cannot read the table {path}: {error.strerror}", remedy=remedy) from None
    modules = {".parquet": "pyarrow.parquet", ".feather": "pyarrow.feather", ".arrow": "pyarrow.feather"}
    if path.suffix not in modules:
        raise UsageError(f"{path} is no table that is known", remedy="give a .csv, .parquet, .feather or .arrow file")
    return import_optional(modules[path.suffix], needed_for=f"{path.suffix} files").read_table(path)


def _csv(path: Path) -> Mapping[str, list[Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    return {name: _typed([row[at] if at < len(row) else "" for row in rows]) for at, name in enumerate(names)}


def _typed(words: list[str]) -> list[Any]:
    """Convert to integers, else to floats (NaN for an empty field), else keep the strings."""
    for kind in (int, lambda word: float(word) if word else float("nan")):
        try:
            return [kind(word) for word in words]
        except ValueError:
            continue
    return words
