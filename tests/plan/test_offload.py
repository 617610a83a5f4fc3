"""The optimizer in the host's memory, weighed: what it frees, takes and costs, and when it is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.traces import GIB, scaled
from trainwright.plan.devices import Device, parse_devices
from trainwright.plan.layout import Layout, choose, offload_layouts, offload_of, weigh, why_not_offloaded
from trainwright.recipe import OPTIMIZERS

DEVICE = Device("some", "cuda", 80 * GIB, 2e12, {"fp32": 2e13, "bf16": 3e14}, host_link=3e10, launch_s=0.0)
NONE = Layout("bf16", "none", False, scaled(kept=4.0))
BLOCK = Layout("bf16", "block", False, scaled(kept=0.5, again=True), complexity=4)
SMALL = DEVICE.with_memory(20 * GIB)
"""Weights, gradients and moments of the traces take 8, 4 and 16 GiB."""


def test_state_leaves_and_gradients_come_and_weights_go() -> None:
    found = offload_of(NONE.scaled.small, DEVICE)
    assert found is not None
    assert (found.state_bytes, found.host_bytes, found.link_bytes) == (16 * GIB, 24 * GIB, 8 * GIB)
    assert found.link_s == pytest.approx(8 * GIB / 3e10)
    assert found.host_s == pytest.approx((2 * 16 + 3 * 4) * GIB / DEVICE.host_bandwidth)


def test_the_device_holds_so_much_less_and_waits_so_much_longer() -> None:
    [moved] = offload_layouts([BLOCK], DEVICE)
    here, there = weigh(BLOCK, DEVICE, 64, 2), weigh(moved, DEVICE, 64, 2)
    assert here.peak_bytes - there.peak_bytes == 16 * GIB
    update = here.time.by_phase["update"]
    assert moved.offload is not None
    assert there.step_s == pytest.approx(here.step_s - update + moved.offload.step_s)
    assert there.time.spent["host"] == moved.offload.step_s


def test_it_is_taken_only_where_nothing_else_fits() -> None:
    layouts = [NONE, BLOCK, *offload_layouts([NONE, BLOCK], DEVICE)]
    roomy, small = choose(layouts, DEVICE, 64), choose(layouts, SMALL, 64)
    assert roomy.best.layout.offload is None
    assert small.best.layout.offload is not None
    assert small.fits
    notes = [{note.topic: note for note in each.notes}["optimizer offload"] for each in (roomy, small)]
    assert [note.choice for note in notes] == ["no", "yes"]
    assert "it would be" in notes[0].why
    assert "slower" in notes[0].why
    assert "nothing fits without" in notes[1].why
    assert "24 GiB of the host's memory" in notes[1].why


def test_what_does_not_fit_either_way_is_told_as_it_stands() -> None:
    choice = choose([NONE, BLOCK, *offload_layouts([NONE, BLOCK], DEVICE)], DEVICE.with_memory(8 * GIB), 64)
    assert not choice.fits
    assert choice.best.layout is BLOCK


def test_the_hosts_memory_is_looked_at_where_it_is_known() -> None:
    poor = replace(SMALL, host_memory_bytes=26 * GIB)
    layouts = offload_layouts([BLOCK], poor)
    choice = choose(layouts, poor, 64, micro=1)
    assert not choice.fits
    assert "of which 26 GiB are free" in choice.notes[-1].why
    assert choose(layouts, replace(poor, host_memory_bytes=27 * GIB), 64, micro=1).fits


def test_there_must_be_something_to_move_and_somewhere_to_move_it() -> None:
    assert offload_layouts([NONE], replace(DEVICE, host_link=0.0)) == []
    stateless = [replace(moment, held={"weights": GIB}) for moment in NONE.scaled.small.moments]
    assert offload_of(replace(NONE.scaled.small, moments=tuple(stateless)), DEVICE) is None


def test_a_devices_file_may_say_what_its_host_does() -> None:
    row = "own: {memory: 8GiB, bandwidth: 1e12, flops: {fp32: 1e13}, host_link: 1e10, host_bandwidth: 2e11}"
    assert parse_devices(row, "x")["own"].host_bandwidth == 2e11


WITHOUT_GAIN = ("adafactor", "muon", "adamw8bit", "adamw4bit")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_of_the_box_gain_by_it(name: str) -> None:
    assert bool(why_not_offloaded(name, {"momentum": 0.9})) == (name in WITHOUT_GAIN)
