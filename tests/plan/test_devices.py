"""The table of devices, and tables of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.errors import RecipeError, UsageError
from trainwright.plan.devices import find_device, known_devices, load_devices, parse_devices
from trainwright.plan.make import choose_precision

GIB = 1 << 30


@pytest.mark.parametrize("device", known_devices().values(), ids=lambda device: device.name)
def test_every_device_of_the_table_is_plausible(device: object) -> None:
    known = known_devices()
    row = find_device(device.name, known)  # type: ignore[attr-defined]
    assert 10 * GIB < row.usable_bytes < row.memory_bytes < 200 * GIB
    assert row.flops["fp32"] <= max(row.flops.values()) < 1e16
    assert 2e11 < row.bandwidth < 1e13
    assert row.source
    assert row.flops.get("bf16", row.flops.get("fp16")) == row.flops["fp16"]


def test_published_figures() -> None:
    h100, a100, t4 = (find_device(name, known_devices()) for name in ("H100 80GB", "a100_40gb", "t4-16gb"))
    assert (h100.flops["bf16"], h100.bandwidth) == (989e12, 3.35e12)
    assert (a100.flops["bf16"], a100.flops["tf32"], a100.flops["fp32"]) == (312e12, 156e12, 19.5e12)
    assert "bf16" not in t4.flops
    chosen = [choose_precision("auto", each.kind, each.precisions, {})[0] for each in (h100, t4)]
    assert chosen == ["bf16", "fp16"]


def test_memory_is_replaced_and_a_margin_is_left() -> None:
    device = find_device("h100-80gb", known_devices()).with_memory(24 * GIB)
    assert device.memory_bytes == 24 * GIB
    assert 22 * GIB < device.usable_bytes < 23 * GIB


def test_an_unknown_name_is_told_what_is_near() -> None:
    with pytest.raises(UsageError, match="did you mean 'h100-80gb'"):
        find_device("h100-80g", known_devices())


def test_a_file_of_the_user_extends_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mi300x: {memory: 192GB, bandwidth: 5.3e12, flops: {fp32: 163e12, bf16: 1307e12}}\n")
    table = load_devices(path)
    assert find_device("MI300X", table).memory_bytes == 192 * 10**9
    assert set(known_devices()) < set(table)


def test_every_problem_of_a_file_is_told_at_once() -> None:
    text = "mine: {memory: lots, bandwith: 1e12, flops: {bf16: 1e12}}\nother: {memory: 1GiB, bandwidth: -1, flops: 3}\n"
    with pytest.raises(RecipeError) as raised:
        parse_devices(text, "mine.yaml")
    paths = {problem.path for problem in raised.value.problems}
    assert paths == {"mine.bandwith", "mine.bandwidth", "mine.flops", "mine.memory", "other.bandwidth", "other.flops"}
    assert "did you mean 'bandwidth'" in str(raised.value)


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n"])
def test_what_is_no_table(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_devices(text, "mine.yaml")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_devices(Path("nowhere.yaml"))
