"""Reads single samples from batches and datasets, and renders them as pictures, text or tables."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from trainwright.checkpoint.cursor import Cursor, MicroBatch
from trainwright.data.fetch import AnyDataset, Failed, Fetch, Key
from trainwright.data.loading import EvaluationBatches
from trainwright.data.ready_batches import ReadyBatches
from trainwright.report.bad_cases import SamplePreview

MAX_TEXT_CHARS = 300
MAX_COLUMNS = 40
MIN_IMAGE_SIDE = 4
"""Pixels. Smaller arrays are shown as tables."""
CHANNELS = (1, 3, 4)


def each_sample(micro: MicroBatch) -> Iterator[object]:
    """Yield the samples of a batch. A part of the batch without one row per sample is left out."""
    for row in range(micro.size):
        yield _row(micro.data, row, micro.size)


def _row(data: object, row: int, size: int) -> object:
    if isinstance(data, Tensor | np.ndarray):
        return data[row] if data.ndim and data.shape[0] == size else data
    if isinstance(data, Mapping):
        return {key: _row(value, row, size) for key, value in data.items()}
    if isinstance(data, tuple | list):
        if len(data) == size and not any(isinstance(each, Tensor | np.ndarray) for each in data):
            return data[row]
        return tuple(_row(value, row, size) for value in data)
    return data


def inputs_of(sample: object) -> object:
    """Return a sample without its target: the first item of a tuple or list, or a mapping without its labels.

    A list of numbers, such as token ids, has no target. It is returned as a tensor.
    """
    if isinstance(sample, Mapping):
        return {name: each for name, each in sample.items() if name != "labels"}
    if isinstance(sample, list) and sample and all(isinstance(each, int | float) for each in sample):
        return torch.tensor(sample)
    return sample[0] if isinstance(sample, tuple | list) and len(sample) else sample


def samples_of(batches: EvaluationBatches, ids: Collection[int]) -> dict[int, object]:
    """Return the samples at these positions of a dataset; fewer for a stream that does not repeat them."""
    dataset, loading, wanted = batches.steps.dataset, batches.steps.loading, set(ids)
    if not isinstance(dataset, IterableDataset | ReadyBatches):
        positions = np.array(sorted(wanted), dtype=np.int64)
        fetch = Fetch(dataset, seed=loading.seed, collate=loading.collate)
        fetched = fetch[Key(0, 0, positions, True, Cursor())]
        if isinstance(fetched, Failed):
            raise fetched.error()
        found = MicroBatch(fetched.data, fetched.ids)
        return dict(zip(found.ids.tolist(), each_sample(found), strict=True))
    kept: dict[int, object] = {}
    for micro in batches:
        if wanted & set(micro.ids.tolist()):
            kept |= {i: each for i, each in zip(micro.ids.tolist(), each_sample(micro), strict=True) if i in wanted}
        if len(kept) == len(wanted):
            break
    return kept


def known_of(dataset: AnyDataset, name: str) -> object:
    """Return an attribute of a dataset, or of the dataset that it is a subset of; None if there is none."""
    while True:
        found = getattr(dataset, name, None)
        if found is not None or not isinstance(dataset, Subset):
            return found
        dataset = dataset.dataset


def class_names(dataset: AnyDataset, count: int) -> list[str]:
    """Return the class names of a dataset (``labels``, ``classes``, or ``vocabulary``), or numbers."""
    for name in ("labels", "classes", "class_names", "vocabulary"):
        found = known_of(dataset, name)
        if isinstance(found, Sequence) and len(found) == count and all(isinstance(each, str) for each in found):
            return [each if each.strip() and each.isprintable() else repr(each) for each in found]
    return [str(number) for number in range(count)]


def shown_sample(sample: object, dataset: AnyDataset, *, side: int) -> SamplePreview:
    """Return the inputs of a sample as a picture of at most ``side`` pixels per side, as text, or as a table."""
    inputs = inputs_of(sample)
    if isinstance(inputs, Mapping):
        texts = [each for each in inputs.values() if isinstance(each, str)]
        images = [each for each in inputs.values() if isinstance(each, Tensor) and _channels_last(each) is not None]
        inputs = images[0] if images else texts[0] if len(texts) == len(inputs) == 1 else inputs
    if isinstance(inputs, np.ndarray):
        inputs = torch.from_numpy(np.ascontiguousarray(inputs))
    if isinstance(inputs, str):
        return SamplePreview("text", inputs[:MAX_TEXT_CHARS])
    if isinstance(inputs, Mapping):
        return SamplePreview("table", _cells({str(key): each for key, each in inputs.items()}))
    if not isinstance(inputs, Tensor):
        return SamplePreview("other", type(inputs).__name__)
    inputs = inputs.detach().cpu()
    if (image_HWC := _channels_last(inputs)) is not None:
        return SamplePreview("image", " x ".join(map(str, inputs.shape)), _encoded(_pixels(image_HWC, side)))
    if inputs.dim() == 1 and not inputs.is_floating_point() and inputs.dtype != torch.bool:
        return SamplePreview("text", _decoded(inputs, known_of(dataset, "decode"))[:MAX_TEXT_CHARS])
    if inputs.dim() <= 1:
        names = known_of(dataset, "inputs")
        names = names if isinstance(names, Sequence) and len(names) == inputs.numel() else range(inputs.numel())
        return SamplePreview("table", _cells(dict(zip(map(str, names), inputs.flatten().tolist(), strict=True))))
    return SamplePreview("other", f"a tensor of shape {tuple(inputs.shape)}")


def _decoded(ids: Tensor, decode: object) -> str:
    if callable(decode):
        text = decode(ids)
        if isinstance(text, str):
            return text
    return " ".join(map(str, ids.tolist()))


def _cells(row: Mapping[str, object]) -> str:
    cells = []
    for name, value in list(row.items())[:MAX_COLUMNS]:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            value = value.item() if value.ndim == 0 else f"shape {tuple(value.shape)}"
        cells.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    more = len(row) - len(cells)
    return (", ".join(cells) + (f", and {more} more" if more else ""))[: 3 * MAX_TEXT_CHARS]


def _channels_last(image: Tensor) -> Tensor | None:
    """Return the image (H, W, C); None for other arrays."""
    if image.dim() == 2 and (image.is_floating_point() or image.dtype == torch.uint8):
        image = image[None]
    if image.dim() != 3 or min(image.shape) < 1:
        return None
    if image.shape[0] in CHANNELS and min(image.shape[1:]) >= MIN_IMAGE_SIDE:
        return image.permute(1, 2, 0)
    return image if image.shape[2] in CHANNELS and min(image.shape[:2]) >= MIN_IMAGE_SIDE else None


def _pixels(image_HWC: Tensor, side: int) -> NDArray[np.uint8]:
    """Return a reduced picture. Values other than 0 to 1 and bytes are scaled from minimum to maximum."""
    image = image_HWC[..., :3].float().nan_to_num(0.0, 0.0, 0.0)
    high, low = float(image.max()), float(image.min())
    if image_HWC.dtype == torch.uint8:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    image = (image - low) / (high - low if high > low else 1.0)
    longest = max(image.shape[:2])
    if longest > side:
        high_side, wide_side = (max(1, round(each * side / longest)) for each in image.shape[:2])
        image = F.adaptive_avg_pool2d(image.permute(2, 0, 1), (high_side, wide_side)).permute(1, 2, 0)
    return (image * 255).round().clamp(0, 255).to(torch.uint8).numpy()


def _encoded(pixels_HWC: NDArray[np.uint8]) -> str:
    """Return a PNG of 8 bits, grey or RGB, in base64 (RFC 2083): header, one filter byte before each row, end."""
    height, width, channels = pixels_HWC.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels_HWC.reshape(height, -1)], 1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
