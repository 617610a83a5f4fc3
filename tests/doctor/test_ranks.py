"""The family of laws over ranks: rows of synthetic ranks are compared, and what comes of it is found or not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

from tests.rows import each_row
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.facts.ranks import (
    ExchangeFacts,
    NonfiniteFacts,
    RanksFacts,
    RankStatus,
    RankStep,
    WeightsChange,
)
from trainwright.doctor.measure.ranks.compare import Comparison
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined, Found, construct, from_json, to_json

NAMES = ("a.weight", "b.weight")
TRAITS = {"modes": "3 of 3 modules in training mode", "changes of the gradients": "clipped by norm at 1"}
SYNCED = ExchangeFacts(calls=1, wrapped_calls=1, synced_calls=1, last_synced=True, collectives=1)
Change = Callable[[RankStep], RankStep]


def row(rank: int, step: int) -> RankStep:
    """A healthy one: what is to be the same is, and the rest is not."""
    if step == 0:
        return RankStep(rank=rank, step=0, weights=(10, 20))
    return RankStep(
        rank=rank,
        step=step,
        weights=(10 + step, 20 + step),
        gradients=(step, -step),
        reduced=(step, -step),
        moments=(3 * step, None),
        buffers=(7, None),
        program=TRAITS,
        groups=({"lr": 0.1},),
        factor=0.4,
        micro_batches=1,
        samples=(100 * rank + step,),
        rng=1000 * rank + step,
        draws=True,
        exchange=SYNCED,
        steps=4,
        own_s=0.01 + 0.0001 * (step % 3),
        step_s=0.02,
    )


def compared(change: Change = lambda row: row, *, steps: int = 6, size: int = 3) -> RanksFacts:
    comparison = Comparison(size, NAMES)
    for step in range(steps + 1):
        comparison.add([change(row(rank, step)) for rank in range(size)])
    return comparison.facts(range(size), [RankStatus(rank=rank, step=steps) for rank in range(size)])


def findings(facts: RanksFacts) -> list[Found]:
    """What the doctor says of facts that went through the log."""
    record = from_json(to_json(Examined(time_s=0.0, step=facts.newest, experiment="ranks", values=strict(vars(facts)))))
    return [each.found for each in diagnose(RunContext([record])).findings]


def codes(facts: RanksFacts) -> list[str]:
    return [found.code for found in findings(facts)]


def on(rank: int, since: int, **changes: object) -> Change:
    """The rows of one rank are others from a step on."""
    return lambda row: replace(row, **changes) if row.rank == rank and row.step >= since else row  # type: ignore[arg-type]


def on_all(**changes: object) -> Change:
    return lambda row: replace(row, **changes) if row.step else row  # type: ignore[arg-type]


def drifting(exchange: ExchangeFacts) -> Change:
    """From step 3 on the gradients of rank 1 are others, and so are then its weights."""
    other = {"weights": (1, 2), "gradients": (3, 4), "reduced": (3, 4), "moments": (5, None)}
    return lambda row: replace(row, exchange=exchange, **other) if row.rank == 1 and row.step >= 3 else row


def test_healthy_ranks_are_found_healthy() -> None:
    assert codes(compared()) == [] and codes(compared(size=2)) == [] and codes(RanksFacts(size=2)) == []


def test_facts_come_back_from_json() -> None:
    facts = compared(drifting(SYNCED))
    assert construct(RanksFacts, json.loads(json.dumps(strict(facts)))) == facts
    assert len(facts.disagreements) == 4


@each_row(
    ("change", "code", "since"),
    [
        (on(1, 0, weights=(1, 2)), "ranks.replicas_diverged", 1),
        (on(2, 4, weights=(1, 2)), "resources.silent_corruption", 4),
        (on(1, 2, groups=({"lr": 0.2},)), "ranks.replicas_diverged", 2),
        (on(1, 2, micro_batches=2), "ranks.replicas_diverged", 2),
        (on(1, 2, buffers=(8, 9)), "ranks.replicas_diverged", 2),
        (drifting(ExchangeFacts(calls=1)), "ranks.ddp_bypassed", 3),
        (drifting(replace(SYNCED, synced_calls=0, last_synced=False)), "ranks.no_sync_at_boundary", 3),
        (drifting(SYNCED), "ranks.stale_buckets", 3),
        (on(1, 3, without_gradient=("b.weight",)), "ranks.unused_parameters", None),
        (on_all(samples=(1, 2)), "ranks.identical_batches", 1),
        (on_all(rng=5), "ranks.same_random_numbers", 1),
        (on_all(summed=True), "ranks.gradients_summed", 1),
        (on(1, 1, own_s=0.019), "ranks.straggler", 4),
        (on(1, 3, gradients=(3, 4), weights=(1, 2)), "ranks.gradients_differ", 3),
        (on(1, 4, moments=(8, None), weights=(1, 2)), "ranks.replicas_diverged", 4),
        (on(0, 2, program={**TRAITS, "modes": "1 of 3 modules in training mode"}), "ranks.programs_differ", 2),
        (on_all(shrunk=True), "ranks.averaged_twice", 1),
        (on(1, 1, factor=0.41), "ranks.gradients_differ", 1),
    ],
)
def test_a_broken_law_has_one_finding(change: Change, code: str, since: int | None) -> None:
    found = findings(compared(change))
    assert [each.code for each in found] == [code]
    assert found[0].since_step == since


def test_the_rank_that_differs_from_most_is_named() -> None:
    assert findings(compared(on(2, 4, weights=(1, 2))))[0].where.rank == 2
    assert findings(compared(on(1, 1, own_s=0.019)))[0].where.rank == 1


def test_a_slow_machine_is_named_by_its_ranks() -> None:
    facts = compared(lambda row: replace(row, own_s=0.019) if row.rank > 1 else row, size=4)
    hosts = [RankStatus(rank=rank, host=f"node{rank // 2}") for rank in range(4)]
    [found] = findings(replace(facts, statuses=tuple(hosts)))
    assert found.code == "ranks.straggler" and found.where.rank is None
    assert "wait for ranks 2, 3 (machine node1)" in found.symptom
    alone = replace(facts, statuses=tuple(replace(each, host="node0") for each in hosts))
    assert "machine" not in findings(alone)[0].symptom


@each_row(
    "change",
    [
        on(1, 2, buffers=(7, 9)),  # a buffer that training changes
        lambda row: replace(row, weights=(), gradients=()),  # sharded
        lambda row: replace(row, weights=(5,) * (row.rank + 1), gradients=()),  # another model on each rank
        on_all(rng=5, draws=False),  # nothing is drawn
        on(1, 6, samples=(6,)),  # once
        on(1, 5, own_s=0.5),  # a hiccup
        lambda row: on(1, 1, own_s=0.019)(replace(row, steps=1)),  # rows of single steps
        lambda row: on(1, 1, own_s=0.019)(replace(row, step_s=0.5)),  # next to nothing of a step
        lambda row: replace(row, without_gradient=("b.weight",)),  # unused everywhere
        lambda row: replace(row, reduced=(row.rank, row.step)),  # the loop reduces by itself, after backward
        lambda row: replace(row, factor=0.4 + 1e-5 * row.rank),  # rounding of norms
        on(1, 2, moments=(None, None)),  # another rank updates them (ZeRO)
        on(0, 6, program={**TRAITS, "modes": "none"}),  # once
        on(0, 6, shrunk=True),
    ],
)
def test_what_is_no_fault_is_not_found(change: Change) -> None:
    assert codes(compared(change)) == []


def with_statuses(*statuses: RankStatus, change: Change = lambda row: row) -> RanksFacts:
    return replace(compared(change, size=len(statuses)), statuses=tuple(statuses))


def statuses(first: RankStatus, second: RankStatus) -> list[str]:
    return codes(with_statuses(first, second))


AT_6 = RankStatus(rank=0, step=6, phase="backward", collectives=9)


def test_a_rank_that_hangs_is_named_with_its_line() -> None:
    late = RankStatus(
        rank=1, step=6, phase="between", collectives=8, stalled=True, still_s=70.0, where="train.py:3 (f)"
    )
    facts = with_statuses(replace(AT_6, stalled=True), late)
    [found] = findings(facts)
    assert (found.code, found.severity, found.where.rank) == ("ranks.stalled", "warning", 1)
    assert "train.py:3" in found.symptom and "70 s" in found.symptom
    failed = with_statuses(replace(AT_6, ended="RuntimeError: timed out"), late)
    assert [(each.code, each.severity) for each in findings(failed)] == [("ranks.stalled", "critical")]


def test_a_rank_that_is_not_heard_of_is_named() -> None:
    [found] = findings(with_statuses(AT_6, RankStatus(rank=1, step=5, silent_s=20.0)))
    assert (found.code, found.severity, found.where.rank) == ("ranks.stalled", "critical", 1)


def test_a_rank_that_ended_early_is_named() -> None:
    ended = RankStatus(rank=1, step=6, ended="finished")
    assert statuses(replace(AT_6, stalled=True), ended) == ["ranks.uneven_steps"]
    assert statuses(replace(AT_6, ended="RuntimeError: closed"), ended) == ["ranks.uneven_steps"]
    assert statuses(AT_6, ended) == []
    assert statuses(replace(AT_6, phase="evaluation", stalled=True), ended) == []


def test_parameters_that_one_rank_does_not_use_are_named() -> None:
    failed = RankStatus(rank=1, step=6, ended="RuntimeError: Expected to have finished", unused=("b.weight",))
    [found] = findings(with_statuses(replace(AT_6, ended="RuntimeError: closed"), failed))
    assert (found.code, found.where.rank, found.where.module) == ("ranks.unused_parameters", 1, "b")
    both = [replace(failed, rank=rank) for rank in (0, 1)]
    assert statuses(*both) == ["ranks.stale_buckets"]


def test_the_rank_whose_own_loss_is_not_finite_is_named() -> None:
    nan = NonfiniteFacts(step=6, own_loss=math.nan, inputs_finite=False, samples=(3, 4))
    told = replace(nan, own_loss=0.3, inputs_finite=True)
    [found] = findings(with_statuses(replace(AT_6, nonfinite=told), RankStatus(rank=1, step=6, nonfinite=nan)))
    assert (found.code, found.where.rank, found.where.sample_ids) == ("ranks.nonfinite_loss", 1, (3, 4))
    assert statuses(replace(AT_6, nonfinite=nan), RankStatus(rank=1, step=6, nonfinite=nan)) == []


def test_a_flipped_bit_is_named_with_its_rank_and_parameter() -> None:
    """Of two ranks, which of them it was is known only by what it saw itself."""
    change = WeightsChange(step=4, parameter="b.weight", one_bit=True)
    facts = compared(on(1, 5, weights=(15, 25 + 2**22)), size=2)
    assert facts.disagreements[0].one_bit and facts.disagreements[0].ranks == ()
    told = replace(facts, statuses=(RankStatus(rank=0), RankStatus(rank=1, changes=(change,))))
    [found] = findings(told)
    assert (found.code, found.where.rank, found.where.module, found.since_step) == (
        "resources.silent_corruption",
        1,
        "b",
        4,
    )
    both = replace(facts, statuses=tuple(RankStatus(rank=rank, changes=(change,)) for rank in (0, 1)))
    assert findings(both)[0].where.rank is None


def test_a_rank_whose_code_writes_to_its_weights_is_named() -> None:
    """Several parameters at once: no defect of a machine."""
    changes = tuple(WeightsChange(step=3, parameter=name, one_bit=False) for name in NAMES)
    facts = compared(on(1, 4, weights=(1, 2)), size=2)
    [found] = findings(replace(facts, statuses=(RankStatus(rank=0), RankStatus(rank=1, changes=changes))))
    assert (found.code, found.where.rank, found.since_step) == ("ranks.replicas_diverged", 1, 3)
    assert "the weights of rank 1 changed" in found.symptom


def test_a_rank_in_another_mode_is_named_and_clips_are_told_apart() -> None:
    off = {**TRAITS, "modes": "1 of 3 modules in training mode"}
    assert findings(compared(on(0, 2, program=off), size=2))[0].where.rank == 0
    unclipped = on(1, 2, program={**TRAITS, "changes of the gradients": "none"}, gradients=(3, 4), weights=(1, 2))
    [found] = findings(compared(unclipped, size=2))
    assert (found.code, found.severity) == ("ranks.programs_differ", "critical")
    assert "rank 0: clipped by norm at 1; rank 1: none" in found.symptom


def divided(row: RankStep) -> RankStep:
    """Tensor parallelism by hand: ``a`` is divided, ``b`` is the same on all ranks, which share batches and numbers."""
    apart = 100 * row.rank
    shared = replace(row, samples=(row.step,), rng=row.step, summed=True) if row.step else row
    weights, gradients = (row.weights[0] + apart, row.weights[1]), (row.step + apart, -row.step)
    return replace(shared, weights=weights, gradients=gradients if row.step else (), moments=(apart, None), reduced=())


def test_shards_are_no_replicas_and_the_rest_is_compared() -> None:
    assert codes(compared(divided)) == []
    drifting = compared(
        lambda row: replace(divided(row), weights=(row.rank, 7 * row.rank)) if row.step > 3 else divided(row)
    )
    assert [each.what for each in drifting.disagreements] == ["weights"]
    assert drifting.disagreements[0].names == ("b.weight",)
