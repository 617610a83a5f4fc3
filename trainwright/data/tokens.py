"""Token ids in a memory-mapped file, such as nanoGPT's train.bin.

Item i covers T + 1 ids from i * stride on: x_T is the first T, y_T is x_T shifted by one. Shapes: B batch, T
block_size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.padding import IGNORE
from trainwright.errors import UsageError

MAX_IDS_SCANNED = 2**28
"""Files of up to this many ids are read once to find the largest, which takes half a second."""
_DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")


class Tokens(Dataset[object]):
    """Windows of ``block_size`` ids over a file of raw numbers, or a .npy file, which is never loaded completely.

    Without ``end``, a sample is (x_T, y_T). With ``end``, the first id of a document is not predicted from the previous
    document, and a sample is a dict with the names that models of ``transformers`` take: ``input_ids``; ``labels``, not
    shifted, because these models shift them (-100: not counted); ``position_ids``, which begin at 0 in each document;
    and ``documents``, the number of the document within the window, see ``block_mask``.

    Args:
        path: The file; a relative path starts at the current folder.
        block_size: Ids of a sample.
        dtype: Integer type of the ids in a file of raw numbers.
        stride: Ids from the beginning of a sample to that of the next; 0: ``block_size``.
        end: The id that ends a document.
        vocab_size: Number of ids, for models that take it from the training set; null: one more than the largest id, if
            the file is short.

    Raises UsageError for a file that cannot be read with these arguments.
    """

    deterministic = True

    def __init__(
        self,
        path: str | Path,
        *,
        block_size: int = 1024,
        dtype: str = "uint16",
        stride: int = 0,
        end: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if block_size < 1 or stride < 0:
            raise UsageError(
                f"block_size and stride are counts, at least 1 and 0; got {block_size} and {stride}",
                remedy="try block_size=1024",
            )
        self._ids = _mapped(Path(path).expanduser(), dtype)
        self.sample_tokens = block_size
        self.stride = stride or block_size
        self.end = end
        if len(self._ids) <= block_size:
            raise UsageError(
                f"{path} has {len(self._ids)} ids, a window needs {block_size + 1}",
                remedy=f"set block_size to at most {max(1, len(self._ids) - 1)}",
            )
        if vocab_size is None and len(self._ids) <= MAX_IDS_SCANNED:
            vocab_size = int(self._ids.max()) + 1
        if vocab_size is not None:  # for a longer file the model needs it as an argument
            self.classes = vocab_size

    def __len__(self) -> int:
        return 1 + (len(self._ids) - self.sample_tokens - 1) // self.stride

    def __getitem__(self, index: int) -> object:
        batch = self.fetch_batch(np.array([index]))
        if isinstance(batch, dict):
            return {name: value[0] for name, value in batch.items()}
        return tuple(each[0] for each in batch)

    def fetch_batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Return the collated batch of these windows, int64."""
        size = self.sample_tokens
        if not len(indices) or not 0 <= int(min(indices)) <= int(max(indices)) < len(self):
            raise IndexError(f"positions are 0 to {len(self) - 1}")
        starts = np.asarray(indices) * self.stride
        windows = np.stack([self._ids[start : start + size + 1] for start in starts.tolist()]).astype(np.int64)
        ids_BT = torch.from_numpy(windows)
        if self.end is None:
            return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
        return packed(ids_BT[:, :-1].contiguous(), self.end)


def packed(ids_BT: Tensor, end: int) -> dict[str, Tensor]:
    """Return a batch with the documents in rows of ids marked, see ``Tokens``. ``end`` terminates each document."""
    begins_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = ids_BT[:, :-1] == end
    at_BT = torch.arange(ids_BT.shape[1], device="cpu").expand_as(ids_BT)
    first_BT = torch.where(begins_BT, at_BT, 0).cummax(1).values
    return {
        "input_ids": ids_BT,
        "labels": ids_BT.masked_fill(begins_BT, IGNORE),
        "position_ids": at_BT - first_BT,
        "documents": begins_BT.cumsum(1),
    }


def block_mask(documents_BT: Tensor) -> Tensor:
    """Return a mask (B, 1, T, T), bool, in which ids attend to themselves and to previous ids of the same document.

    For ``scaled_dot_product_attention`` and as ``attention_mask`` of ``transformers``.
    """
    length = documents_BT.shape[1]
    is_causal_TT = torch.ones(length, length, dtype=torch.bool, device=documents_BT.device).tril()
    is_same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (is_same_BTT & is_causal_TT)[:, None]


def _mapped(path: Path, dtype: str) -> NDArray[np.integer]:
    if dtype not in _DTYPES:
        raise UsageError(f"dtype={dtype!r} is no integer type of ids", remedy=f"one of {', '.join(_DTYPES)}")
    try:
        if path.suffix == ".npy":
            ids: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
        else:
            ids = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        remedy = f"give the path of a file of ids; relative ones start at {Path.cwd()}"
        raise UsageError(f"cannot read the ids in {path}: {error.strerror or error}", remedy=remedy) from None
    except ValueError as error:  # an empty file, or one of another width
        remedy = "give the dtype it was written with"
        raise UsageError(f"{path} holds no ids of {dtype}: {error}", remedy=remedy) from None
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{path} holds numbers of {ids.dtype}, no ids", remedy="write integers")
    return ids
