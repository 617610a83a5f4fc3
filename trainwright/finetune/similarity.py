"""Hashes of content, and MinHash signatures that find near duplicates.

Broder 1997, "On the resemblance and containment of documents": the fraction of equal minima of random hashes estimates
the Jaccard similarity of two sets, here of runs of three words.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

HASHES = 32
"""Values of a signature. The standard deviation of the estimated similarity is at most 0.09."""
BANDS = 8
"""Signatures are compared if one of 8 bands of 4 values is equal. This finds 98 % of pairs with a similarity of 0.8."""
NEAR_SIMILARITY = 0.85
"""Estimated similarity from which two samples count as near duplicates."""
SHINGLE_WORDS = 3
MAX_CLUSTER_FRACTION = 0.1
"""In a larger group, similar samples share a template and are not duplicates."""

_words = np.random.Philox(key=1297).random_raw(2 * HASHES).astype(np.uint64)
_FACTORS, _SHIFTS = (_words[:HASHES] | np.uint64(1)).astype(np.uint32), _words[HASHES:].astype(np.uint32)


def content_hash(parts: Sequence[tuple[str, str]]) -> int:
    """Return a 64-bit hash of (role, text) pairs that ignores white space around and between words, and case."""
    plain = "\x1e".join(f"{role}\x1f{' '.join(text.lower().split())}" for role, text in parts)
    return int.from_bytes(hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def signature(parts: Sequence[tuple[str, str]]) -> NDArray[np.uint32]:
    """Return the MinHash signature (32,) of all texts but system messages."""
    words = [word for role, text in parts if role not in ("system", "developer") for word in text.lower().split()]
    hashes = np.array([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words] or [0], dtype=np.uint32)
    with np.errstate(over="ignore"):
        runs = hashes[: max(1, len(hashes) - SHINGLE_WORDS + 1)].copy()
        for at in range(1, min(SHINGLE_WORDS, len(hashes))):
            runs = (runs * np.uint32(0x9E3779B1)) ^ hashes[at : at + len(runs)]
        values = np.unique(runs)[:, None] * _FACTORS + _SHIFTS
        values ^= values >> np.uint32(15)
        values *= np.uint32(0x85EBCA77)
        values ^= values >> np.uint32(13)
    found: NDArray[np.uint32] = values.min(0)
    return found


def near_pairs(signatures: NDArray[np.uint32], others: NDArray[np.uint32] | None = None) -> Iterator[tuple[int, int]]:
    """Yield (row, earlier or other row) of similar samples, at most one for each row.

    Args:
        signatures: Signatures (n, 32).
        others: Signatures (m, 32) to compare with; by default earlier rows of ``signatures``.
    """
    width, alone = HASHES // BANDS, others is None
    tables: list[dict[bytes, int]] = [{} for _ in range(BANDS)]
    if others is not None:
        for row, each in enumerate(others):
            for band, table in enumerate(tables):
                table.setdefault(each[band * width : (band + 1) * width].tobytes(), row)
    known = signatures if others is None else others
    for row, each in enumerate(signatures):
        found = -1
        for band, table in enumerate(tables):
            key = each[band * width : (band + 1) * width].tobytes()
            candidate = table.setdefault(key, row) if alone else table.get(key, -1)
            is_other = candidate >= 0 and not (alone and candidate == row)
            if found < 0 and is_other and float((known[candidate] == each).mean()) >= NEAR_SIMILARITY:
                found = candidate
        if found >= 0:
            yield row, found


def groups(hashes: NDArray[np.uint64], signatures: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return for each row the first row of its group of equal and nearly equal rows (n,).

    A group of more than a tenth of all rows, of which at least three differ, is split into groups of equal rows.
    """
    size = len(hashes)
    _, first_rows, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first: NDArray[np.int64] = first_rows[inverse].astype(np.int64)
    parent = first.copy()

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row

    for row, other in near_pairs(signatures):
        one, two = sorted((root(row), root(other)))
        parent[two] = one
    joined = np.array([root(row) for row in range(size)], dtype=np.int64)
    counts = np.bincount(joined, minlength=size)
    distinct = np.bincount(joined[np.unique(first)], minlength=size)
    too_large = (counts[joined] > MAX_CLUSTER_FRACTION * size) & (distinct[joined] > 2)
    return np.where(too_large, first, joined)


def is_held_out(hashes: NDArray[np.uint64], group: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Return which rows belong to the validation set: by the smallest hash in their group.

    A row keeps its side when rows are added or reordered, unless it joins a group.
    """
    size = len(hashes)
    least = np.full(size, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(least, group, hashes)
    held: NDArray[np.bool_] = least[group] / 2.0**64 < fraction
    return held
