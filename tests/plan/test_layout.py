"""The layout of a run on a device: what is chosen, why, and what would make the rest fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.traces import GIB, scaled
from trainwright.plan.devices import Device
from trainwright.plan.layout import Layout, Offload, choose, micro_sizes, weigh
from trainwright.plan.trace.run_forecast import PeakMemory, remedies

DEVICE = Device("some", "cuda", 80 * GIB, 2e12, {"fp32": 2e13, "bf16": 3e14}, host_link=3e10, launch_s=0.0)
NONE = Layout("bf16", "none", False, scaled(kept=4.0), complexity=0, logits_bytes=GIB)
BLOCK = Layout("bf16", "block", False, scaled(kept=0.5, again=True), complexity=4)


def test_the_plainest_that_fits_is_taken() -> None:
    choice = choose([NONE, BLOCK], DEVICE, 64)
    assert choice.fits
    assert choice.best.layout is NONE
    assert choice.best.micro * choice.best.accumulation == 64
    assert choice.best.peak_bytes <= DEVICE.usable_bytes


def test_checkpointing_is_taken_where_nothing_else_fits() -> None:
    small = DEVICE.with_memory(34 * GIB)
    assert not weigh(NONE, small, 64, 1).fits
    choice = choose([NONE, BLOCK], small, 64)
    assert choice.fits
    assert choice.best.layout is BLOCK


def test_a_larger_micro_batch_is_not_taken_where_it_is_not_faster() -> None:
    roomy = DEVICE.with_memory(270 * GIB)
    assert weigh(NONE, roomy, 64, 32).fits
    assert choose([NONE], roomy, 64).best.micro < 32


def test_a_batch_that_fits_is_not_cut() -> None:
    assert choose([NONE, BLOCK], DEVICE.with_memory(1000 * GIB), 64).best.micro == 64


def test_launches_make_micro_batches_larger() -> None:
    roomy = DEVICE.with_memory(270 * GIB)
    slow_host = replace(roomy, launch_s=5e-2)
    assert choose([NONE], slow_host, 64).best.micro > choose([NONE], roomy, 64).best.micro


def test_the_recipes_own_micro_batch_is_kept() -> None:
    choice = choose([NONE, BLOCK], DEVICE, 64, micro=32)
    assert (choice.best.micro, choice.best.layout) == (32, BLOCK)
    assert {option.micro for option in choice.options} == {32}


def test_where_nothing_fits_the_one_that_holds_least_is_named() -> None:
    choice = choose([NONE, BLOCK], DEVICE.with_memory(16 * GIB), 64)
    assert not choice.fits
    assert (choice.best.micro, choice.best.layout) == (1, BLOCK)
    assert "more than" in choice.notes[0].why


def test_each_decision_says_why_and_what_its_neighbours_cost() -> None:
    notes = {note.topic: note for note in choose([NONE, BLOCK], DEVICE, 64).notes}
    assert list(notes) == ["micro-batch", "precision", "checkpointing", "loss", "optimizer offload"]
    assert "would be at" in notes["micro-batch"].why
    assert "master weights" in notes["precision"].why
    assert "block would be" in notes["checkpointing"].why
    assert "slower" in notes["checkpointing"].why
    assert "over the link" in notes["optimizer offload"].why


@pytest.mark.parametrize(("size", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (7, [1, 2, 3, 4, 7])])
def test_micro_batches_cut_the_batch_evenly(size: int, expected: list[int]) -> None:
    assert micro_sizes(size) == expected


def test_many_sizes_are_thinned() -> None:
    sizes = micro_sizes(1_000_003)
    assert sizes[0] == 1
    assert sizes[-1] == 1_000_003
    assert len(sizes) <= 40


def held(**changes: object) -> PeakMemory:
    """7 G parameters in fp32 with AdamW: 28 + 28 + 56 GB, and 4 GB besides."""
    kinds = {"weights": 28 * 10**9, "gradients": 28 * 10**9, "optimizer": 56 * 10**9}
    known = {"peak_bytes": 116 * 10**9, "kinds": kinds, "optimizer": "adamw", "parameters": 7 * 10**9}
    known |= {"offload": Offload(56 * 10**9, 112 * 10**9, 56 * 10**9, link_s=1.0, host_s=5.0)}
    return PeakMemory(**{"trainable": 7 * 10**9, **known, **changes})  # type: ignore[arg-type]


def test_seven_billion_parameters_on_80_gib() -> None:
    found = {remedy.name: remedy for remedy in remedies(held(), DEVICE)}
    assert found["Adafactor"].means == found["LoRA"].means == "here"
    assert found["Adafactor"].peak_bytes == 84 * 10**9
    assert not found["Adafactor"].fits
    assert found["LoRA"].peak_bytes == 32 * 10**9
    assert found["8-bit moments"].settings == ("optimizer.use=adamw8bit",)
    assert found["optimizer offload"].means == "here"
    assert found["optimizer offload"].settings == ("optimizer.offload=true",)
    assert found["optimizer offload"].peak_bytes == 60 * 10**9
    assert found["optimizer offload"].fits
    poor = {each.name: each for each in remedies(held(), replace(DEVICE, host_memory_bytes=100 * 10**9))}
    assert not poor["optimizer offload"].fits
    assert "93.1 GiB are free" in poor["optimizer offload"].why
    assert found["sharding over 2 such devices"].means == "devices"
    assert next(iter(found.values())).means == "here"


def test_seven_billion_parameters_on_24_gib() -> None:
    found = {remedy.name: remedy for remedy in remedies(held(), DEVICE.with_memory(24 * GIB))}
    assert not [name for name, remedy in found.items() if remedy.means != "devices" and remedy.fits]
    assert any(name.startswith("sharding over") and remedy.fits for name, remedy in found.items())


def test_autocast_keeps_no_copies_of_frozen_weights() -> None:
    kinds = {"weights": 28 * 10**9, "temporaries": 15 * 10**9}
    lora = next(each for each in remedies(held(kinds=kinds, cast_bytes=14 * 10**9), DEVICE) if each.name == "LoRA")
    assert lora.peak_bytes == 116 * 10**9 - 14 * 10**9


def test_what_is_done_already_is_not_proposed() -> None:
    names = {each.name for each in remedies(held(optimizer="adafactor", has_lora=True, kinds={}, offload=None), DEVICE)}
    assert names == set()
