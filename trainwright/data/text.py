"""Character-level language modelling: windows over a text, as a map-style dataset of (x_T, y_T).

Item i covers T + 1 characters from i * stride on: x_T is the first T, y_T is x_T shifted by one. All windows are full;
the last characters of a split, at most ``block_size``, are in no window. Shapes: B batch, T block_size.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.padding import IGNORE
from trainwright.errors import UsageError, require_choice, suggest_file

Split: TypeAlias = Literal["train", "val"]
SKIPPED_FOLDERS = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__")


class CharText(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``block_size`` characters over the first 1 - val_share ("train") or the rest ("val").

    ``stride`` is the distance between two windows. By default it is ``block_size``: an epoch predicts each character
    once. A smaller stride gives more samples per epoch, with each character in several contexts, for runs of many
    epochs. In a run shorter than an epoch it makes no difference (300 steps at stride 16 and 64: 1.666 and 1.663 nats).
    For "val" it is always ``block_size``, so that every character counts once. ``vocabulary`` has the characters of the
    full text in code point order, so that validation has no unknown symbols.
    """

    deterministic = True  # items draw no random numbers

    def __init__(
        self,
        text: str,
        *,
        split: Split = "train",
        block_size: int = 64,
        val_share: float = 0.1,
        stride: int = 0,
    ) -> None:
        _check(split, block_size, val_share, stride)
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        present = np.bincount(codes, minlength=1) > 0
        self.vocabulary = tuple(chr(code) for code in np.flatnonzero(present))
        self._index = {symbol: index for index, symbol in enumerate(self.vocabulary)}
        self.classes = len(self.vocabulary)
        self.sample_tokens = block_size
        self.split = split
        self.stride = stride if stride and split == "train" else block_size
        # 1 or 2 bytes per character (4 beyond 32,767 symbols); widened to int64 only in the batch
        narrow = np.uint8 if self.classes <= 256 else np.int16 if self.classes <= 32_767 else np.int32
        self._all = torch.from_numpy((np.cumsum(present) - 1)[codes].astype(narrow))
        self._cut = round(len(text) * (1 - val_share))
        self._ids = self._all[: self._cut] if split == "train" else self._all[self._cut :]
        if len(self._ids) <= block_size:
            raise UsageError(
                f"the {split} split has {len(self._ids)} characters, a window needs {block_size + 1}",
                remedy="take a smaller block_size, another val_share or a longer text",
            )

    def __len__(self) -> int:
        return (len(self._ids) - 1 - self.sample_tokens) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")  # ends iteration over a sequence
        start = index % len(self) * self.stride
        window = self._ids[start : start + self.sample_tokens + 1].long()
        return window[:-1], window[1:]

    def fetch_batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the batch (x_BT, y_BT) of these samples by one gather. Equals ``default_collate`` of the items."""
        starts_B = torch.from_numpy(np.asarray(indices, dtype=np.int64)) * self.stride
        positions_BT = starts_B[:, None] + torch.arange(self.sample_tokens + 1, device="cpu")
        window_BT = self._ids[positions_BT].long()
        # contiguous, as from default_collate, because the flatten of the loss would copy a view of T+1 columns anyway
        return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()

    def encode(self, text: str) -> list[int]:
        """Return the ids of the characters. Raises UsageError for a character that is not in the text."""
        unknown = sorted(set(text) - self._index.keys())
        if unknown:
            raise UsageError(f"not in the vocabulary: {unknown}", remedy="leave these characters out")
        return [self._index[symbol] for symbol in text]

    def decode(self, ids: Sequence[int] | NDArray[np.int64] | Tensor) -> str:
        """Return the characters of a flat sequence of ids."""
        listed = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids
        return "".join(self.vocabulary[each] for each in listed)

    def references(self) -> dict[str, float]:
        """Return the nats per character that simple models reach, to compare a loss with.

        ``uniform`` is ln V. ``unigram`` is the entropy of the characters of the *full* text, ``bigram`` the entropy of
        a character given the previous one, both of the empirical distribution (the score of a table fitted to the full
        text). ``unigram_val`` and ``bigram_val`` are the scores on the validation text of a table counted on the
        training text (add-one): a validation loss below ``bigram_val`` is better than a table of pairs.
        """
        train, val = self._all[: self._cut].numpy(), self._all[self._cut :].numpy()
        whole_VV = self._pairs(self._all.numpy())
        train_VV, val_VV = self._pairs(train) + 1.0, self._pairs(val)
        ones_V = np.bincount(train, minlength=self.classes) + 1.0
        val_V = np.bincount(val, minlength=self.classes)
        return {
            "uniform": math.log(self.classes),
            "unigram": _entropy(np.bincount(self._all.numpy())),
            "bigram": _entropy(whole_VV) - _entropy(whole_VV.sum(1)),
            "unigram_val": float(-(val_V * np.log(ones_V / ones_V.sum())).sum() / max(1, val_V.sum())),
            "bigram_val": float(
                -(val_VV * np.log(train_VV / train_VV.sum(1, keepdims=True))).sum() / max(1, val_VV.sum())
            ),
        }

    def _pairs(self, ids: NDArray[np.integer]) -> NDArray[np.int64]:
        wide = ids.astype(np.int64)
        counts = np.bincount(wide[:-1] * self.classes + wide[1:], minlength=self.classes**2)
        return counts.reshape(self.classes, self.classes)

    def content_sha256(self) -> str:
        """Return a hash of everything that determines the items: ids of the split, vocabulary, block size, stride."""
        facts = repr((self.vocabulary, self.sample_tokens, self.stride, len(self._ids)))
        digest = hashlib.sha256(facts.encode("utf-8", "surrogatepass"))
        digest.update(self._ids.numpy().tobytes())
        return digest.hexdigest()


def _check(split: str, block_size: int, val_share: float, stride: int) -> None:
    require_choice("split", split, get_args(Split))
    if block_size < 1 or stride < 0:
        raise UsageError(
            f"block_size and stride are counts, at least 1 and 0; got {block_size} and {stride}",
            remedy="try block_size=64",
        )
    if not 0 <= val_share < 1:
        raise UsageError(f"val_share must be in [0, 1); got {val_share}", remedy="try val_share=0.1")


def _entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the empirical distribution, in nats."""
    seen = counts[counts > 0]
    shares = seen / seen.sum()
    return float(-(shares * np.log(shares)).sum())


def python_topics(split: Split = "train", *, block_size: int = 64, val_share: float = 0.1, stride: int = 0) -> CharText:
    """The help texts that ship with Python (``pydoc_data.topics``), by topic, separated by empty lines.

    On 3.11: 465,126 characters, 103 symbols. Other Python versions ship other texts.

    Args:
        split: ``train``, or ``val``, which is the end of the text.
        block_size: Characters of a sample.
        val_share: Fraction of the text that is held out for ``val``.
        stride: Characters from the beginning of a training sample to that of the next; 0: ``block_size``.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return CharText(text, split=split, block_size=block_size, val_share=val_share, stride=stride)


def stdlib_source(
    split: Split = "train",
    *,
    block_size: int = 64,
    val_share: float = 0.1,
    stride: int = 0,
    limit_bytes: int = 10_000_000,
) -> CharText:
    """The source of Python's standard library, by path.

    Only files of pure ASCII, without tests and idlelib. Depends on the Python release and its packaging.

    Args:
        split: ``train``, or ``val``, which is the end of the text.
        block_size: Characters of a sample.
        val_share: Fraction of the text that is held out for ``val``.
        stride: Characters from the beginning of a training sample to that of the next; 0: ``block_size``.
        limit_bytes: Size at which the text is cut off.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[bytes] = []
    size_bytes = 0
    for path in _python_files(root):
        source = path.read_bytes()
        if source.isascii():
            sources.append(source)
            size_bytes += len(source) + 1
        if size_bytes >= limit_bytes:
            break
    text = b"\n".join(sources)[:limit_bytes].decode("ascii")
    return CharText(text, split=split, block_size=block_size, val_share=val_share, stride=stride)


def _python_files(root: Path) -> list[Path]:
    """Return files by path; does not enter skipped folders, because site-packages may hold 100,000 files."""
    found: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def text_file(
    path: str | Path, split: Split = "train", *, block_size: int = 64, val_share: float = 0.1, stride: int = 0
) -> CharText:
    """The characters of a text file in UTF-8.

    Args:
        path: The file; a relative path starts at the current folder.
        split: ``train``, or ``val``, which is the end of the text.
        block_size: Characters of a sample.
        val_share: Fraction of the text that is held out for ``val``.
        stride: Characters from the beginning of a training sample to that of the next; 0: ``block_size``.

    Raises UsageError when it cannot be read.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        remedy = f"convert it: iconv -t UTF-8 {path}"
        raise UsageError(f"{path} is not UTF-8 at byte {error.start}", remedy=remedy) from None
    except OSError as error:
        remedy = suggest_file(Path(path).expanduser(), "a text file")
        raise UsageError(f"cannot read the text {path}: {error.strerror}", remedy=remedy) from None
    return CharText(text, split=split, block_size=block_size, val_share=val_share, stride=stride)


MASKED_FRACTION, REPLACED_FRACTION = 0.8, 0.1
"""Fractions of the chosen characters that are masked, and replaced by a random one; the rest stays (BERT, 3.1)."""


class MaskedText(Dataset[tuple[Tensor, Tensor]]):
    """(ids_T, target_T) from windows of a text; the target of a character that was not chosen is -100.

    The choice is drawn from torch's global CPU generator when the item is read. ``data.fetch.Fetch`` seeds that
    generator by epoch and index. In a validation set the choice is a function of the index alone. The id of the mask is
    the last one.
    """

    def __init__(self, text: CharText, *, mask_share: float = 0.15) -> None:
        if not 0 < mask_share < 1:
            raise UsageError(f"mask_share must be in (0, 1); got {mask_share}", remedy="try mask_share=0.15")
        self.text, self.mask_share = text, mask_share
        self.vocabulary = (*text.vocabulary, "\N{REPLACEMENT CHARACTER}")
        self.classes, self.mask = text.classes + 1, text.classes
        self.sample_tokens = text.sample_tokens
        self.deterministic = text.split == "val"

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids_T, _ = self.text[index]
        generator = torch.Generator("cpu").manual_seed(index % len(self)) if self.deterministic else None
        draw_2T = torch.rand(2, len(ids_T), generator=generator, device="cpu")
        other_T = torch.randint(self.mask, ids_T.shape, generator=generator, device="cpu")
        chosen_T, how_T = draw_2T[0] < self.mask_share, draw_2T[1]
        seen_T = torch.where(
            how_T < MASKED_FRACTION, self.mask, torch.where(how_T < MASKED_FRACTION + REPLACED_FRACTION, other_T, ids_T)
        )
        return torch.where(chosen_T, seen_T, ids_T), torch.where(chosen_T, ids_T, IGNORE)

    def content_sha256(self) -> str:
        """Return a hash of the text and of the fraction that is chosen."""
        return hashlib.sha256(f"{self.text.content_sha256()} {self.mask_share}".encode()).hexdigest()


def masked_topics(
    split: Split = "train", *, block_size: int = 64, val_share: float = 0.1, stride: int = 0, mask_share: float = 0.15
) -> MaskedText:
    """The help texts that ship with Python, of which some characters are hidden, for masked language modelling.

    Of the chosen characters 80 % are masked, 10 % replaced by a random one, and 10 % stay as they are. They are drawn
    again in each epoch; in ``val`` they are always the same.

    Args:
        split: ``train``, or ``val``, which is the end of the text.
        block_size: Characters of a sample.
        val_share: Fraction of the text that is held out for ``val``.
        stride: Characters from the beginning of a training sample to that of the next; 0: ``block_size``.
        mask_share: Fraction of the characters that are predicted.
    """
    text = python_topics(split, block_size=block_size, val_share=val_share, stride=stride)
    return MaskedText(text, mask_share=mask_share)
