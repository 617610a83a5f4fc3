"""Statistics by layer become heat maps in bounded memory; peaks and what is not finite stay."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report_pages.runs import make_run, started, step
from trainwright.report.pages import layers as layers_module
from trainwright.report.pages.layers import MAX_CODE, MISSING_CODE, NOT_FINITE_CODE, LayerMaps
from trainwright.report.pages.log import IncrementalLog
from trainwright.report.pages.render import runs_page
from trainwright.report.pages.view import RunView

LAYERS = ("embedding", "blocks.0", "head")


def line(at_step: int, norms: tuple[object, ...], **more: object) -> bytes:
    record = {"kind": "layers", "time_s": 1.0, "step": at_step, "grad_norm": norms, **more}
    return json.dumps(record, separators=(",", ":")).encode()


def maps_of(maps: LayerMaps) -> dict[str, np.ndarray[Any, np.dtype[np.uint16]]]:
    said: Any = maps.to_json()
    count = len(said["layers"])
    return {
        each["name"]: np.frombuffer(base64.b64decode(each["codes"]), "<u2").reshape(-1, count) for each in said["maps"]
    }


def test_a_map_has_a_log_scale_and_tells_missing_from_not_finite() -> None:
    maps = LayerMaps()
    maps.take(line(1, (0.001, 1.0, 1000.0), layers=LAYERS, act_std=("NaN", 1.0, 2.0)))
    maps.take(line(2, ("NaN", "Infinity", 0.0), act_std=("NaN", 2.0, 1.0)))
    said: Any = maps.to_json()
    assert (said["layers"], said["steps"]) == (list(LAYERS), [1, 2])
    assert [each["name"] for each in said["maps"]] == ["gradient norm", "activations, deviation"]
    assert (said["maps"][0]["low"], said["maps"][0]["high"]) == (0.001, 1000.0)
    norms = maps_of(maps)["gradient norm"]
    assert norms.tolist() == [[0, round(MAX_CODE / 2), MAX_CODE], [NOT_FINITE_CODE, NOT_FINITE_CODE, 0]]
    assert maps_of(maps)["activations, deviation"][:, 0].tolist() == [MISSING_CODE, MISSING_CODE]


def test_of_a_long_run_peaks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "MAX_STEPS", 40)
    monkeypatch.setattr(layers_module, "MAX_STEPS_DRAWN", 10)
    maps = LayerMaps()
    for number in range(203):
        peak: object = 1e6 if number == 77 else "NaN" if number == 131 else 1.0
        maps.take(line(number, (1.0, peak, 1.0), layers=LAYERS if number == 0 else ()))
    said: Any = maps.to_json()
    codes = maps_of(maps)["gradient norm"]
    assert maps.count == 203 and codes.shape == (len(said["steps"]), 3) and len(codes) <= 10
    assert sorted(set(codes[:, 1].tolist())) == [0, MAX_CODE, NOT_FINITE_CODE] and not codes[:, 0].any()
    apart = np.diff(np.array(said["steps"], dtype=float))
    assert apart.max() < 2 * 203 / 10, "none of it is coarse"
    maps.go_back_to(50)
    left: Any = maps.to_json()
    assert max(left["steps"]) <= 50


@pytest.mark.parametrize(
    "odd",
    [
        b"[1]",
        b"{}",
        b'{"step":"x","layers":["a"]}',
        b"[" * 9999,
        line(2, (1.0,)),
        line(2, ("evil", None, [1.0])),
        line(2, (1.0,), layers=["x"] * 1000),
    ],
)
def test_what_is_no_such_record_hurts_nothing(odd: bytes) -> None:
    maps = LayerMaps()
    maps.take(line(1, (1.0, 2.0, 3.0), layers=LAYERS))
    maps.take(odd)
    assert maps_of(maps)["gradient norm"][0].tolist()[-1] == MAX_CODE


def test_they_are_read_from_the_log_and_put_on_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [started(), step(1), step(2)])
    with folder.log.open("ab") as log:
        log.write(line(1, (1.0, 2.0, math.e), layers=LAYERS) + b"\n" + line(2, (1.0, 1.0, 1.0)) + b"\n")
    read = IncrementalLog(folder.log)
    read.advance()
    assert read.layers.count == 2 and '"layers":["embedding"' in runs_page([RunView(folder.path, read)])
    one, other = RunView(folder.path, read), RunView(folder.path, read)
    assert "embedding" not in runs_page([one, other]), "not of several runs"
