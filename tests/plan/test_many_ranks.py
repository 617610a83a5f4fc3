"""The arithmetic of layouts on many ranks, on traces made by hand: shares of memory, waits, stages, and the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.traces import GIB, scaled
from trainwright.plan.devices import find_device, known_devices
from trainwright.plan.layout import Layout
from trainwright.plan.many_ranks import ManyRanks, RankModel, best_of
from trainwright.plan.parallel import Degrees
from trainwright.plan.splits import ModelShape
from trainwright.plan.traffic import Activations
from trainwright.plan.units import Unit, Weight, Weights

H100 = find_device("h100-80gb", known_devices())
BLOCK = Unit((Weight(1 << 14, 1 << 14),), 7)  # 1 GiB each, in fp32
WEIGHTS = Weights(Unit((Weight(1 << 14, 1 << 14),)), BLOCK)


def many(size: int = 64, state: float = 8.0) -> ManyRanks:
    """8 GiB of weights: 28 GiB with gradients and moments."""
    layout = Layout("bf16", "none", False, scaled(state=state))
    model = RankModel(WEIGHTS, {"none": Activations(stream=1 << 20)}, {"none": layout}, None)
    return ManyRanks(model, {(1, 1): model}, H100, size, "bf16", ModelShape("made by hand"))


def test_ranks_hold_their_part_and_what_is_gathered() -> None:
    placed = many().place(Degrees(shard=8), 3, "none", 1)
    at_update = placed.scaled.small.moments[-1].held
    assert {kind: size / GIB for kind, size in at_update.items() if size > GIB // 10} == {
        "weights": 1.0,
        "optimizer": 2.0,
        "gradients": 0.5,
    }
    in_backward = placed.scaled.small.moments[2].held
    assert in_backward["weights"] / GIB == 1 + 3  # the part, the root and two blocks
    assert in_backward["temporaries"] / GIB == 4  # the root's gradients and a block's, as made and as sent
    whole = many().place(Degrees(shard=8), 2, "none", 1).scaled.small.moments[2].held
    assert whole["weights"] / GIB == 1 + 8


def test_what_hides_and_what_waits() -> None:
    copies, shards = (many().place(degrees, 3, "none", 1) for degrees in (Degrees(replicate=64), Degrees(shard=64)))
    assert copies.exposed_s == pytest.approx(copies.exchange_s)  # after the last backward pass
    assert shards.exposed_s < shards.exchange_s
    slow = replace(H100, kind="cpu")
    on_cpu = replace(many(), device=slow).place(Degrees(shard=64), 3, "none", 1)
    assert on_cpu.exposed_s == pytest.approx(on_cpu.exchange_s)


def test_stages_wait_for_each_other_and_hold_micro_batches() -> None:
    placed = many().place(Degrees(pipeline=4), 3, "none", 4)
    assert placed.accumulation == 16
    passes = placed.busy_s + placed.exposed_s - placed.time.by_phase["update"]
    assert placed.bubble_s / (placed.bubble_s + passes) == pytest.approx(3 / (16 + 3))
    kept = 4 * GIB  # of a micro-batch
    assert [placed.stage_bytes[0] - each for each in placed.stage_bytes] == [0, kept, 2 * kept, 3 * kept]


def test_the_first_and_the_last_stage_sum_what_they_share() -> None:
    tied = replace(many(), shape=ModelShape("tied", tied_bytes=GIB))
    placed = tied.place(Degrees(pipeline=4, shard=2), 3, "none", 4)
    (row,) = (each for each in placed.traffic if each.what == "tied weights")
    assert (row.axis, row.collective, row.num_bytes, row.hides) == ("pipeline", "all-reduce", GIB // 2, False)


def test_weights_are_divided_where_copies_do_not_fit() -> None:
    layouts = [Degrees(replicate=64), Degrees(8, 8), Degrees(shard=64)]
    assert best_of(many(state=8.0).all(layouts[:1])).fits
    large = many(state=40.0)
    best = best_of(large.all(layouts))
    assert best.fits and best.degrees.shard > 1 and not best_of(large.all(layouts[:1])).fits
