"""Images, texts and histograms that a user logs, and their files in the run folder.

A file is ``media/NAME/step-00000120.png``, ``.txt`` or ``.json``. Reading one executes nothing, and its size is
limited.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwright.errors import UsageError
from trainwright.runs.files import UnreadableFile, open_file, parse_json
from trainwright.runs.printing import printable
from trainwright.runs.records import Media

FOLDER = "media"
IMAGE, TEXT, HISTOGRAM = "image", "text", "histogram"
SUFFIXES = {IMAGE: "png", TEXT: "txt", HISTOGRAM: "json"}
MAX_PIXELS = 4_000_000
"""Maximum number of pixels of an image that is kept."""
MAX_TEXT_CHARS = 100_000
MAX_FILE_BYTES = 2**24
"""Maximum size of a file that is read: an image of MAX_PIXELS with 4 channels that does not compress."""
MAX_GRID = 64
"""Maximum number of images of a batch that are shown."""
NUM_BINS = 64
MAX_BINS = 1024
_CHANNELS = (1, 3, 4)
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_FILE = re.compile(r"media/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}/step-[0-9]{8,18}\.(png|txt|json)")

Pixels: TypeAlias = NDArray[np.uint8]
"""Height, width and 1, 3 or 4 channels."""


class Image:
    """An image for ``tw.log`` and ``watch.log``.

    A tensor is copied and stays on its device until it is written. Integers are values from 0 to 255. Floats are values
    from 0 to 1. If a value is outside of this range, the smallest value is drawn black and the largest white, and the
    caption states both. Values that are not finite are black.

    Args:
        data: A tensor or an array of shape ``(H, W)``, ``(C, H, W)`` or ``(H, W, C)`` with 1, 3 or 4 channels; a batch
            ``(N, C, H, W)``, whose first 64 images are shown as a grid; an image of PIL; or a figure of matplotlib.
        caption: Text below the image.

    Raises:
        UsageError: If ``data`` has another type or shape.

    Example:
        >>> tw.log(reconstruction=tw.Image(output[0], caption="first sample of the batch"))
    """

    def __init__(self, data: Any, caption: str = "") -> None:
        self._caption = caption
        self._is_channels_first = hasattr(data, "detach")
        if hasattr(data, "savefig"):
            self._data: Any = _drawn(data)
        elif hasattr(data, "convert") and hasattr(data, "mode"):
            kept = data.mode if data.mode in ("L", "RGB", "RGBA") else "RGBA" if "A" in data.mode else "RGB"
            self._data = np.array(data.convert(kept))
        elif hasattr(data, "detach"):
            self._data = data.detach().clone()
        else:
            self._data = np.array(data)
        shape = tuple(self._data.shape)
        if not _is_shape_of_images(shape):
            what = f"an image is a {type(data).__name__}" + (f" of shape {shape}" if shape else "")
            raise UsageError(what, remedy="give (H, W), (C, H, W), (H, W, C) or (N, C, H, W), with 1, 3 or 4 channels")

    @property
    def num_pixels(self) -> int:
        """The number of pixels, summed over the images of a grid."""
        shape: tuple[int, ...] = tuple(self._data.shape)
        if len(shape) == 4:
            return min(shape[0], MAX_GRID) * shape[2] * shape[3]
        return math.prod(shape) // (1 if len(shape) == 2 else shape[0] if shape[0] in _CHANNELS else shape[2])

    @cached_property
    def _scaled(self) -> tuple[Pixels, str]:
        array = _array_of(self._data)
        if array.ndim == 4:
            array = _grid_of(array[:MAX_GRID])
        elif array.ndim == 2:
            array = array[:, :, None]
        else:
            first, last = array.shape[0] in _CHANNELS, array.shape[2] in _CHANNELS
            array = array.transpose(1, 2, 0) if first and (self._is_channels_first or not last) else array
        return _pixels_of(np.ascontiguousarray(array))

    @property
    def pixels(self) -> Pixels:
        """The image as bytes ``(H, W, C)``. Synchronizes with the device of a tensor."""
        return self._scaled[0]

    @property
    def caption(self) -> str:
        """The caption, with the range of the values if they are not within 0 to 1."""
        return " ".join(filter(None, (self._caption[:500], self._scaled[1])))


class Histogram:
    """A histogram for ``tw.log`` and ``watch.log``.

    Args:
        values: A tensor or an array of numbers. A tensor is copied and stays on its device until it is written.
        bins: The number of bins of equal width between the smallest and the largest finite value, at most 1,024.

    Raises:
        UsageError: If ``bins`` is out of range.

    Example:
        >>> tw.log(logits=tw.Histogram(logits))
    """

    def __init__(self, values: Any, bins: int = NUM_BINS) -> None:
        if not 1 <= bins <= MAX_BINS:
            raise UsageError(f"a histogram has {bins} bins", remedy=f"give 1 to {MAX_BINS:,} bins")
        self._values = values.detach().clone() if hasattr(values, "detach") else np.array(values)
        self._bins = bins

    @cached_property
    def _counted(self) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        values = _array_of(self._values).astype(np.float64).ravel()
        finite = values[np.isfinite(values)]
        counts, edges = np.histogram(finite, self._bins)
        return counts, edges, len(values) - len(finite)

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of values in each bin."""
        return self._counted[0]

    @property
    def edges(self) -> NDArray[np.float64]:
        """The limits of the bins, one more than there are bins."""
        return self._counted[1]

    @property
    def num_not_finite(self) -> int:
        """The number of values that are infinite or not a number."""
        return self._counted[2]


Loggable: TypeAlias = Image | Histogram | str
"""The types that can be logged besides numbers. A string is a text."""


def flat_grey(pixels: Pixels) -> Pixels:
    """Return a grey image as ``(H, W)``, which trackers expect, and other images unchanged."""
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def file_of(name: str, step: int, type_: str) -> str:
    """Return the path of a file relative to the run folder. Names with special characters get a hash."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60] or "_"
    if safe != name:
        safe += "-" + hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"{FOLDER}/{safe}/step-{step:08d}.{SUFFIXES[type_]}"


def type_of(value: Loggable) -> str:
    """Return ``image``, ``text`` or ``histogram``."""
    return IMAGE if isinstance(value, Image) else HISTOGRAM if isinstance(value, Histogram) else TEXT


def encode(value: Loggable) -> bytes:
    """Return the content of the file of a value."""
    if isinstance(value, Image):
        return png_of(value.pixels)
    if isinstance(value, Histogram):
        fields = {
            "edges": [float(f"{each:.6g}") for each in value.edges.tolist()],
            "counts": value.counts.tolist(),
            "not_finite": value.num_not_finite,
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    return value.encode("utf-8", "replace")


def shortened(text: str) -> str:
    """Return the first MAX_TEXT_CHARS of a text. If it is longer, append a line with its length."""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}\n... ({len(text):,} characters)"


class MediaFile(NamedTuple):
    """The checked content of a file. ``type`` is ``image``, ``text`` or ``histogram``."""

    type: str
    content: bytes

    @property
    def text(self) -> str:
        """The content of a text, with control characters escaped."""
        return printable(self.content.decode("utf-8", "replace"))

    @property
    def histogram(self) -> Mapping[str, Any]:
        """The content of a histogram: ``edges``, ``counts`` and ``not_finite``."""
        value = parse_json(self.content.decode("utf-8", "replace"))
        return {name: value[name] for name in ("edges", "counts", "not_finite")}


def media_in(run: Path) -> tuple[str, ...]:
    """Return the names of the folders in ``media`` of a run folder, at most 200."""
    folder = run / FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return ()
    return tuple(sorted(printable(each.name) for each in folder.iterdir() if not each.is_symlink())[:200])


def read_media(run: Path, record: Media) -> MediaFile:
    """Read the file of a record, which is not trusted: the run may come from somebody else.

    Raises UnreadableFile if it is missing, outside of ``media``, too large, or its content does not fit its name.
    """
    found = _FILE.fullmatch(record.file)
    path = run / FOLDER if found is None else run / record.file
    if found is None:
        raise UnreadableFile(path, "the log names a file that is not a media file of the run")
    if path.parent.is_symlink() or path.parent.parent.is_symlink():
        raise UnreadableFile(path, "it is below a symbolic link", remedy="replace the link by a copy of the folder")
    with open_file(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableFile(path, f"it has more than {MAX_FILE_BYTES:,} bytes")
    read = MediaFile(next(each for each, suffix in SUFFIXES.items() if suffix == found[1]), content)
    if not _is_valid(read):
        raise UnreadableFile(path, f"it is not a valid {read.type}")
    return read


def _is_valid(file: MediaFile) -> bool:
    if file.type == IMAGE:  # a header of a few bytes can claim an image of gigabytes
        if not file.content.startswith(_PNG_SIGNATURE) or file.content[12:16] != b"IHDR" or len(file.content) < 33:
            return False
        size: tuple[int, int] = struct.unpack(">II", file.content[16:24])
        return 0 < size[0] * size[1] <= MAX_PIXELS
    if file.type == HISTOGRAM:
        try:
            edges, counts = file.histogram["edges"], file.histogram["counts"]
            numbers = [*edges, *counts, file.histogram["not_finite"]]
        except (ValueError, KeyError, TypeError):
            return False
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
        return are_numbers and 0 < len(counts) <= MAX_BINS and len(edges) == len(counts) + 1
    return True


def _is_shape_of_images(shape: tuple[int, ...]) -> bool:
    if not all(shape):
        return False
    if len(shape) == 3:
        return shape[0] in _CHANNELS or shape[2] in _CHANNELS
    return len(shape) == 2 or (len(shape) == 4 and shape[1] in _CHANNELS)


def _array_of(data: Any) -> NDArray[Any]:
    if not hasattr(data, "detach"):
        return np.asarray(data)
    if data.dtype.is_floating_point:
        data = data.float()  # numpy has no bfloat16
    return np.asarray(data.cpu())


def _drawn(figure: Any) -> Pixels:
    """Return the pixels of a figure of matplotlib. The canvas of the figure is unchanged."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]

    canvas = figure.canvas
    try:
        drawn = FigureCanvasAgg(figure)
        drawn.draw()
        return np.array(drawn.buffer_rgba())
    finally:
        figure.set_canvas(canvas)


def _grid_of(images: NDArray[Any]) -> NDArray[Any]:
    """Return images ``(N, C, H, W)`` as one ``(H, W, C)``, about as wide as high."""
    count, channels, height, width = images.shape
    across = int(np.ceil(np.sqrt(count)))
    down = -(-count // across)
    cells = np.zeros((across * down, channels, height, width), images.dtype)
    cells[:count] = images
    grid = cells.reshape(down, across, channels, height, width).transpose(0, 3, 1, 4, 2)
    return grid.reshape(down * height, across * width, channels)


def _pixels_of(array: NDArray[Any]) -> tuple[Pixels, str]:
    """Return bytes, and the range of the values if they are floats outside of 0 to 1."""
    if array.dtype == np.uint8:
        return array, ""
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255, ""
    if array.dtype.kind in "iu":
        return np.clip(array, 0, 255).astype(np.uint8), ""
    values = array.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    is_usual = low >= 0.0 and high <= 1.0
    begin, size = (0.0, 1.0) if is_usual else (low, (high - low) or 1.0)
    scaled = np.nan_to_num((values - begin) / size, nan=0.0, posinf=0.0, neginf=0.0)
    return np.round(scaled * 255).astype(np.uint8), "" if is_usual else f"(values {low:.3g} to {high:.3g})"


def png_of(pixels: Pixels) -> bytes:
    """Return a PNG file. Pillow is not used, because it is not a requirement of this package."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # the first byte of a row: no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 4)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
