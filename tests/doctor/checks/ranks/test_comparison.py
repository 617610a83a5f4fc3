"""Rows of made-up ranks are compared: each check fires on its fault and is silent on what looks like it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.facts.ranks import (
    CollectiveFacts,
    ExchangeFacts,
    NonfiniteFacts,
    RanksFacts,
    RankStatus,
    RankStep,
    WeightsChange,
)
from trainwright.doctor.measure.ranks.compare import Comparison
from trainwright.runs.json_values import strict
from trainwright.runs.records import Examined, Found, construct

NAMES = ("a.weight", "b.weight")
PROGRAM = {"modes": "3 of 3 modules in training mode", "changes of the gradients": "clipped by norm at 1"}
SYNCED = ExchangeFacts(wrapped_calls=1, synced_calls=1, last_synced=True)
BY_HAND = ExchangeFacts()
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
        program=PROGRAM,
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


def compared(change: Change, *, steps: int = 6, size: int = 3, **more: RankStatus) -> RanksFacts:
    comparison = Comparison(size, NAMES)
    for step in range(steps + 1):
        comparison.add([change(row(rank, step)) for rank in range(size)])
    statuses = [more.get(f"rank{rank}", RankStatus(rank=rank, step=steps, host="m")) for rank in range(size)]
    return comparison.facts(range(size), statuses)


def findings(facts: RanksFacts) -> list[Found]:
    record = Examined(time_s=0.0, step=facts.newest, experiment="ranks", values=strict(vars(facts)))
    return [each.found for each in diagnose(RunContext([record])).findings if each.found.severity != "info"]


def on(rank: int, since: int = 1, **changes: object) -> Change:
    """One rank is different from a step on."""
    return lambda each: replace(each, **changes) if each.rank == rank and each.step >= since else each  # type: ignore[arg-type]


def apart(each: RankStep) -> RankStep:
    """The gradients of a rank differ, and so its weights after the first update."""
    if not each.step:
        return each
    weights = tuple(n + each.rank * (each.step > 1) for n in each.weights)
    return replace(each, gradients=(each.step, each.rank), reduced=(each.step, each.rank), weights=weights)


def exchanged(exchange: ExchangeFacts) -> Change:
    return lambda each: replace(apart(each), exchange=exchange)


def test_healthy_ranks() -> None:
    facts = compared(lambda each: each)
    assert findings(facts) == []
    assert construct(RanksFacts, json.loads(json.dumps(strict(facts)))) == facts


@pytest.mark.parametrize(
    ("change", "code", "rank"),
    [
        (exchanged(replace(SYNCED, synced_calls=0, last_synced=False)), "ranks.ddp_does_not_exchange", None),
        (exchanged(SYNCED), "ranks.ddp_does_not_exchange", None),
        (exchanged(BY_HAND), "ranks.gradients_differ", None),
        (lambda each: replace(apart(each), reduced=(each.step, 0)), "ranks.gradients_differ", None),
        (on(1, 3, groups=({"lr": 0.05},)), "ranks.replicas_diverged", 1),
        (on(2, 4, micro_batches=2), "ranks.replicas_diverged", 2),
        (on(0, 2, buffers=(8, None)), "ranks.replicas_diverged", 0),
        (on(1, 4, weights=(8, 24)), "resources.silent_corruption", 1),
        (on(1, 2, program={**PROGRAM, "modes": "0 of 3 modules in training mode"}), "ranks.programs_differ", 1),
        (lambda each: replace(each, samples=(each.step,)), "ranks.identical_batches", None),
        (lambda each: replace(each, rng=each.step), "ranks.same_random_numbers", None),
        (lambda each: replace(each, factor=0.2 + each.rank), "ranks.gradients_differ", None),
        (lambda each: replace(each, summed=True), "ranks.gradients_off_by_ranks", None),
        (lambda each: replace(each, shrunk=True), "ranks.gradients_off_by_ranks", None),
        (on(2, 1, own_s=0.03), "ranks.straggler", 2),
        (on(2, 3, without_gradient=("a.weight",)), "ranks.unused_parameters", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults(change: Change, code: str, rank: int | None) -> None:
    found = findings(compared(change, steps=16))[0]
    assert (found.code, found.where.rank) == (code, rank)


def replays(size: int, **wrong: int) -> Change:
    """Steps are replayed. ``wrong`` are changes of gradients, such as r1_of_2=1: replay by rank 1 of rank 2's batch.

    With two ranks the third vote is named again_0 or again_1.
    """

    def change(each: RankStep) -> RankStep:
        own = [(each.rank - n) % size for n in range(3)]
        names = [f"r{each.rank}_of_{batch}" for batch in own]
        if size == 2:
            names[2] = f"again_{each.rank}"
        sums = tuple((100 * batch + each.step, wrong.get(name, 0)) for name, batch in zip(names, own))
        return replace(each, replayed=sums if each.step % 2 == 0 else ())

    return change


@pytest.mark.parametrize(
    ("size", "wrong", "guilty"),
    [
        (4, {"r1_of_1": 1}, 1),
        (4, {"r2_of_1": 1}, 2),
        (4, {"r1_of_1": 1, "r1_of_0": 1, "r1_of_3": 1}, 1),
        (2, {"r1_of_1": 1}, 1),
        (2, {"r0_of_1": 1}, 0),
        (2, {"r1_of_1": 1, "again_1": 2, "r1_of_0": 3}, 1),
        (2, {"r1_of_1": 1, "again_1": 1, "r1_of_0": 1}, None),
        (4, {"r1_of_1": 1, "r2_of_2": 1}, "no finding"),
        (3, {"r1_of_1": 1, "r2_of_1": 2}, "no finding"),
        (2, {"r1_of_1": 1, "again_1": 2, "r0_of_0": 3, "again_0": 4}, "no finding"),
        (4, {}, "no finding"),
    ],
)
def test_the_rank_whose_gradients_others_cannot_replay(size: int, wrong: dict[str, int], guilty: object) -> None:
    found = findings(compared(replays(size, **wrong), size=size))
    assert [each.where.rank for each in found] == ([] if guilty == "no finding" else [guilty])
    assert all(each.code == "resources.silent_corruption" and "gradient of b.weight" in each.symptom for each in found)


def test_ranks_with_different_processors_are_not_replayed() -> None:
    change = replays(4, r1_of_1=1)
    assert findings(compared(lambda each: replace(change(each), processor=str(each.rank)), size=4)) == []


def test_ranks_that_train_apart_and_average_their_weights() -> None:
    assert findings(compared(exchanged(BY_HAND))) == []  # step 6: they may average later
    averages = {
        f"rank{rank}": RankStatus(
            rank=rank, step=16, changes=(WeightsChange(step=8, parameter="a.weight", one_bit=False),)
        )
        for rank in range(3)
    }
    assert findings(compared(exchanged(BY_HAND), steps=16, **averages)) == []


def test_the_inner_module_is_called() -> None:
    """After a first step through the wrapper."""
    found = findings(compared(lambda each: replace(apart(each), exchange=SYNCED if each.step < 2 else BY_HAND)))
    assert found[0].code == "ranks.ddp_does_not_exchange"
    late = compared(lambda each: each if each.step < 3 else replace(apart(each), exchange=BY_HAND))
    found = findings(late)
    assert found[0].code == "ranks.ddp_does_not_exchange" and "ddp.module" in found[0].cause


def by_hand(change: Change) -> Change:
    return lambda each: replace(change(each), exchange=BY_HAND)


def shard(each: RankStep) -> RankStep:
    """The second parameter is divided: each rank begins with other values and makes other gradients."""
    weights = (each.weights[0], each.weights[1] + 1000 * (each.rank + 1))
    gradients = (each.gradients[0], 7 * each.rank) if each.step else ()
    return replace(each, weights=weights, gradients=gradients, reduced=gradients, samples=(each.step,), rng=each.step)


def all_shards(each: RankStep) -> RankStep:
    each, by = shard(each), 100 * each.rank
    gradients = tuple(n + by + 1 for n in each.gradients)
    return replace(each, weights=(each.weights[0] + by, each.weights[1]), gradients=gradients, groups=({"lr": by},))


def begins_alike(each: RankStep) -> RankStep:
    """Experts with the same first weights, in a forward pass that communicates."""
    gradients = (each.step, each.rank) if each.step else ()
    weights = (each.weights[0], each.weights[1] + each.rank * (each.step > 1))
    divides = each.rank == 1
    return replace(each, weights=weights, gradients=gradients, reduced=gradients, divides=divides, samples=(each.step,))


def updates_a_part(each: RankStep) -> RankStep:
    """Each rank has complete gradients and moments of its part alone, and receives the other weights."""
    if not each.step:
        return each
    return replace(each, gradients=(each.step, each.rank), reduced=(each.rank, 1), moments=(each.rank, each.rank))


def adapter(each: RankStep) -> RankStep:
    """Low-rank factors of a divided layer: the first gradients of one factor are 0, because the other is."""
    weights = (10 + each.rank + each.step, 20 + each.rank * (each.step > 1))
    gradients = (0 if each.step == 1 else each.rank, each.rank) if each.step else ()
    return replace(each, weights=weights, gradients=gradients, reduced=gradients, samples=(each.step,))


@pytest.mark.parametrize("change", [shard, all_shards, begins_alike, updates_a_part, adapter], ids=lambda c: c.__name__)
def test_models_that_are_divided(change: Change) -> None:
    assert findings(compared(by_hand(change))) == []


def test_a_replica_beside_shards_is_still_compared() -> None:
    def change(each: RankStep) -> RankStep:
        each = shard(each)
        return replace(each, weights=(99, each.weights[1])) if (each.rank, each.step) == (2, 5) else each

    assert findings(compared(by_hand(change)))[0].where.rank == 2


def test_own_weights_and_gradients_that_are_combined() -> None:
    own = compared(by_hand(lambda each: replace(each, weights=(each.rank, each.rank + each.step))))
    found = findings(own)[0]
    assert found.code == "ranks.replicas_diverged" and "from the start" in found.symptom


@pytest.mark.parametrize(
    "change",
    [
        lambda each: replace(each, samples=(5,)) if each.step == 6 else each,  # the last batch is short
        lambda each: replace(each, samples=(each.step,), batch=100 * each.rank + each.step, rng=each.step),
        lambda each: replace(each, rng=each.step, draws=False),
        lambda each: replace(each, program=PROGRAM if each.step != 3 or each.rank else {**PROGRAM, "loss": "mse"}),
        lambda each: replace(each, own_s=0.03 if each.step % 3 == each.rank else 0.01),
        lambda each: replace(each, without_gradient=("b.weight",)),
        lambda each: replace(each, shrunk=each.step == 2),
    ],
)
def test_what_looks_like_a_fault(change: Change) -> None:
    assert findings(compared(change)) == []


def status(rank: int, **values: object) -> RankStatus:
    return RankStatus(rank=rank, **{"step": 6, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"rank1": status(1, step=3, stalled=True, still_s=9.0)}, ("ranks.stalled", 1)),
        ({"rank2": status(2, silent_s=20.0)}, ("ranks.stalled", 2)),
        (
            {"rank0": status(0, step=6, phase="forward", stalled=True), "rank1": status(1, step=5, ended="finished")},
            ("ranks.uneven_steps", 1),
        ),
        ({"rank1": status(1, nonfinite=NonfiniteFacts(step=6, own_loss=math.nan))}, ("ranks.nonfinite_loss", 1)),
        ({"rank1": status(1, unused=("a.weight",))}, ("ranks.unused_parameters", 1)),
        ({"rank1": status(1, ended="finished"), "rank2": status(2)}, None),
        ({"rank1": status(1, nonfinite=NonfiniteFacts(step=6, own_loss=1.0))}, None),
    ],
)
def test_where_the_ranks_are(statuses: dict[str, RankStatus], expected: tuple[str, int] | None) -> None:
    found = findings(compared(lambda each: each, **statuses))
    assert ([(each.code, each.where.rank) for each in found[:1]] or [None]) == [expected]  # type: ignore[list-item]


def test_a_stalled_rank_with_a_report_of_nccl() -> None:
    report = "communicator 27a079b8: AllReduce operations; 2 ranks have launched up to operation 64; Rank 1 has not"
    stalled = status(1, step=3, stalled=True, still_s=9.0)
    found = findings(compared(lambda each: each, rank0=status(0, nccl=(report,)), rank1=stalled))[0]
    assert found.code == "ranks.stalled"
    assert [each.seen for each in found.evidence if each.measure == "report of NCCL (RAS)"] == [[report]]


def collective(number: int, what: str, *, is_done: bool = False, group: str = "gloo group 0") -> CollectiveFacts:
    return CollectiveFacts(group=group, number=number, what=what, is_done=is_done)


SUM, COPY = "all_reduce of Float [3]", "broadcast of Float [3]"


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        ([collective(4, SUM)], [collective(4, COPY)], ["4 of gloo group 0", SUM, COPY]),
        ([collective(4, SUM)], [collective(4, f"{SUM}, Float [1]")], ["4 of gloo group 0", SUM, f"{SUM}, Float [1]"]),
        ([collective(4, SUM)], [collective(3, SUM, is_done=True)], ["4 of gloo group 0", SUM, "not begun"]),
        (
            [collective(4, SUM)],  # the root of a copy does not wait
            [collective(4, COPY, is_done=True), collective(5, SUM)],
            ["4 of gloo group 0", SUM, COPY],
        ),
        (
            [collective(9, SUM, group="other"), collective(4, SUM, is_done=True)],
            [collective(9, SUM, group="other"), collective(5, COPY)],
            ["5 of gloo group 0", "not begun", COPY],
        ),
        (
            [collective(3, SUM), collective(4, SUM)],  # it was not noted that the third has completed
            [collective(3, SUM, is_done=True), collective(4, COPY)],
            ["4 of gloo group 0", SUM, COPY],
        ),
        ([collective(4, SUM)], [collective(4, SUM)], []),
        ([collective(4, "alltoall_base of Float [3]")], [collective(4, "alltoall_base of Float [0]")], []),
        ([collective(0, "send 0->1 of Float [3]")], [collective(0, "recv 1<-0")], []),
        ([collective(4, SUM)], [collective(4, COPY, group="other")], []),
        ([collective(4, SUM)], [], []),
    ],
    ids=[
        "kind",
        "shapes",
        "behind",
        "passed",
        "groups",
        "late note",
        "same",
        "exchange",
        "messages",
        "apart",
        "no record",
    ],
)
def test_the_collective_in_which_stalled_ranks_differ(
    first: list[CollectiveFacts], second: list[CollectiveFacts], differ: list[str]
) -> None:
    ranks = {
        f"rank{rank}": status(rank, step=3, stalled=True, still_s=9.0, recorded=tuple(recorded))
        for rank, recorded in enumerate((first, second))
    }
    found = findings(compared(lambda each: each, size=2, **ranks))[0]
    assert found.code == "ranks.stalled"
    seen = [each.seen for each in found.evidence if each.measure == "collective in which the ranks differ"]
    assert [[*each.values()] for each in seen] == ([differ] if differ else [])  # type: ignore[attr-defined]


def test_what_one_rank_writes_to_its_weights() -> None:
    """Several parameters: a load on one rank. One bit of one: a defect."""
    changes = tuple(WeightsChange(step=4, parameter=name, one_bit=False) for name in NAMES)
    loaded = findings(compared(on(1, 5, weights=(1, 2)), rank1=status(1, changes=changes)))[0]
    assert (loaded.code, loaded.where.rank, loaded.since_step) == ("ranks.replicas_diverged", 1, 4)
    flip = (WeightsChange(step=4, parameter="a.weight", one_bit=True),)
    flipped = findings(compared(on(1, 5, weights=(16, 25)), rank1=status(1, changes=flip)))[0]
    assert (flipped.code, flipped.where.rank, flipped.where.module) == ("resources.silent_corruption", 1, "a")
