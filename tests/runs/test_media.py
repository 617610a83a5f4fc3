"""Images, texts and histograms as files: what they hold, and what is refused of a foreign folder."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from trainwright.errors import UsageError
from trainwright.runs.files import UnreadableFile
from trainwright.runs.media import MAX_PIXELS, MAX_TEXT_CHARS, Loggable, encode, file_of, read_media, shortened, type_of
from trainwright.runs.records import Media

RAMP = np.array([[0.0, 0.5, 1.0], [1.0, 0.0, 0.25]])
BYTES = np.array([[0, 128, 255], [255, 0, 64]], np.uint8)


def pil(mode: str) -> Any:
    image = pytest.importorskip("PIL.Image")
    return image.fromarray(BYTES).convert(mode)


SHAPES = {
    "rows and columns": (torch.tensor(RAMP), (2, 3, 1)),
    "a tensor with channels": (torch.tensor(RAMP).expand(3, 2, 3), (2, 3, 3)),
    "a tensor of 3 by 3": (torch.zeros(3, 3, 3), (3, 3, 3)),
    "an array with channels last": (np.repeat(RAMP[:, :, None], 4, 2), (2, 3, 4)),
    "an array with channels first": (np.repeat(np.pad(RAMP, ((0, 0), (0, 2)))[None], 3, 0), (2, 5, 3)),
    "bfloat16": (torch.tensor(RAMP, dtype=torch.bfloat16), (2, 3, 1)),
    "bytes": (BYTES, (2, 3, 1)),
    "integers": (torch.tensor(BYTES.astype(np.int64)), (2, 3, 1)),
    "a batch": (torch.tensor(RAMP).expand(5, 1, 2, 3), (4, 9, 1)),
    "with a gradient": (torch.tensor(RAMP, requires_grad=True), (2, 3, 1)),
    "of PIL": (lambda: pil("L"), (2, 3, 1)),
    "of PIL with transparency": (lambda: pil("LA"), (2, 3, 4)),
}


@pytest.mark.parametrize("row", SHAPES)
def test_an_image_is_read_back_by_another_program(row: str) -> None:
    reader = pytest.importorskip("PIL.Image")
    data, shape = SHAPES[row]
    image = tw.Image(data() if callable(data) else data)
    assert image.pixels.shape == shape
    read = np.asarray(reader.open(io.BytesIO(encode(image))))
    assert np.array_equal(read.reshape(shape), image.pixels)
    if "3 by 3" not in row:
        assert np.array_equal(image.pixels[:2, :3, 0], BYTES)


def test_floats_outside_of_0_to_1_are_scaled_and_said() -> None:
    image = tw.Image(torch.tensor([[-1.0, 0.0, 3.0], [float("nan"), float("inf"), 3.0]]), caption="input")
    assert image.pixels[:, :, 0].tolist() == [[0, 64, 255], [0, 0, 255]]
    assert image.caption == "input (values -1 to 3)"


def test_a_logged_tensor_may_change_afterwards() -> None:
    values = torch.zeros(2, 2)
    image, histogram = tw.Image(values), tw.Histogram(values, bins=1)
    values.add_(1)
    assert image.pixels.max() == 0 and histogram.edges.tolist() == [-0.5, 0.5]


def test_a_figure_of_matplotlib_keeps_its_canvas() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    figure.add_subplot().plot([1, 2])
    canvas = figure.canvas
    assert tw.Image(figure).pixels.shape == (50, 100, 4)
    assert figure.canvas is canvas


NO_IMAGES: dict[str, Any] = {
    "five channels": np.zeros((5, 6, 6)),
    "nothing": np.zeros((0, 4)),
    "a number": 3.0,
    "a batch without channels": np.zeros((2, 5, 4, 4)),
}


@pytest.mark.parametrize("row", NO_IMAGES)
def test_what_is_no_image_is_refused_with_its_remedy(row: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)image.*\(C, H, W\)"):
        tw.Image(NO_IMAGES[row])


def test_a_histogram_counts_finite_values(tmp_path: Path) -> None:
    histogram = tw.Histogram(torch.tensor([0.0, 0.1, 1.0, float("nan"), float("inf")]), bins=2)
    assert json.loads(encode(histogram)) == {"edges": [0, 0.5, 1], "counts": [2, 1], "not_finite": 2}
    with pytest.raises(UsageError, match="1 to 1,024"):
        tw.Histogram([1.0], bins=5000)
    assert sum(tw.Histogram(torch.full((3,), float("nan"))).counts) == 0


NAMES = ("recon", "val/recon", "../../etc/passwd", "..", "", "a" * 500, "\u56fe\u50cf", "a\0b", "CON:")


@pytest.mark.parametrize("name", NAMES)
def test_each_name_has_a_folder_of_its_own_in_media(name: str, tmp_path: Path) -> None:
    file = file_of(name, 3, "image")
    folder, below, last = file.split("/")
    assert (folder, last) == ("media", "step-00000003.png")
    assert below and len(below) < 100 and not below.startswith(".") and below.replace("-", "_").isidentifier()
    assert len({file_of(each, 3, "image") for each in NAMES}) == len(NAMES)


def record(file: str) -> Media:
    return Media(time_s=0.0, step=1, name="x", file=file)


def store(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


VALUES: dict[str, Loggable] = {"image": tw.Image(RAMP), "text": "<b>\x1b[2J", "histogram": tw.Histogram(RAMP)}


@pytest.mark.parametrize("row", VALUES)
def test_what_was_written_is_read(row: str, tmp_path: Path) -> None:
    value = VALUES[row]
    assert type_of(value) == row
    file = file_of("x", 1, row)
    store(tmp_path, file, encode(value))
    read = read_media(tmp_path, record(file))
    assert read.type == row
    assert read.content == encode(value)
    if row == "text":
        assert read.text == "<b>\\x1b[2J"


def png_claiming(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(20)


FORGED = {
    "a path out of the folder": ("../secret.txt", b"secret"),
    "a path out of media": ("media/../../secret.txt", b"secret"),
    "an absolute path": ("/etc/passwd", b""),
    "another file of the run": ("log.jsonl", b"{}"),
    "a page": ("media/x/step-00000001.html", b"<script>"),
    "a page as an image": ("media/x/step-00000001.png", b"<svg onload=alert(1)>"),
    "an image of gigabytes": ("media/x/step-00000001.png", png_claiming(60_000, 60_000)),
    "an image of no size": ("media/x/step-00000001.png", png_claiming(0, 5)),
    "code as a histogram": ("media/x/step-00000001.json", b'{"edges":["<b>",1],"counts":[1],"not_finite":0}'),
    "a histogram without edges": ("media/x/step-00000001.json", b'{"counts":[1],"not_finite":0}'),
    "a list as a histogram": ("media/x/step-00000001.json", b"[]"),
    "a large file": ("media/x/step-00000001.txt", b"x" * (2**24 + 1)),
}


@pytest.mark.parametrize("row", FORGED)
def test_a_forged_file_is_refused(row: str, tmp_path: Path) -> None:
    name, content = FORGED[row]
    run = tmp_path / "run"
    if not name.startswith("/"):
        (run / "media" / "x").mkdir(parents=True, exist_ok=True)
        store(run, name, content)
    with pytest.raises(UnreadableFile):
        read_media(run, record(name))


@pytest.mark.parametrize("link", ["media", "media/x", "media/x/step-00000001.txt"])
def test_no_link_is_followed(link: str, tmp_path: Path) -> None:
    store(tmp_path / "else" / "media" / "x", "step-00000001.txt", b"secret")
    run = tmp_path / "run"
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(tmp_path / "else" / link)
    with pytest.raises(UnreadableFile):
        read_media(run, record("media/x/step-00000001.txt"))


def test_a_long_text_is_cut_and_says_so() -> None:
    text = shortened("x" * (MAX_TEXT_CHARS + 7))
    assert text.endswith(f"\n... ({MAX_TEXT_CHARS + 7:,} characters)") and len(text) < MAX_TEXT_CHARS + 40


def test_pixels_are_counted_before_they_are_copied_to_the_host() -> None:
    assert tw.Image(torch.empty(3, 10, 20)).num_pixels == 200
    assert tw.Image(torch.empty(1000, 3, 10, 20)).num_pixels == 64 * 200
    assert tw.Image(np.empty((10, 20, 3))).num_pixels == 200 < MAX_PIXELS
    assert os.sep not in file_of("a/b", 1, "text").split("/", 1)[1].split("/")[0]
