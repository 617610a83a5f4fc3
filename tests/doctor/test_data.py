"""The laws of the data: they hold on healthy loops, and every violation breaks the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, TensorDataset

import trainwright as tw
from tests.doctor.law_loops import BATCH, CLASSES, WIDTH, Change, Loop, broken, found, net, states, watched
from trainwright.doctor.data.measure.digests import row_digests

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

TRAINED = 96
"""Rows of the 128 that healthy loops here train on; the others are evaluated."""


def train_on_first(loop: Loop) -> None:
    loop.batch = lambda step: torch.arange(step * BATCH, (step + 1) * BATCH) % TRAINED


def evaluating(first: int, last: int, *, size: int = 128, shuffled: bool = False) -> Change:
    """Trains on the first rows, and evaluates those from ``first`` to ``last`` now and then."""
    order = torch.randperm(last - first, generator=torch.Generator().manual_seed(1)) + first

    def change(loop: Loop) -> None:
        train_on_first(loop)

        def end(step: int) -> None:
            if (step + 1) % 6:
                return
            loop.model.eval()
            with torch.no_grad():
                for part in (order if shuffled else torch.arange(first, last)).split(size):
                    F.cross_entropy(loop.model(loop.x[part]), loop.y[part])
            loop.model.train()

        loop.end = end

    return change


def evaluating_others_each_time(loop: Loop) -> None:
    train_on_first(loop)

    def end(step: int) -> None:
        if step in (5, 11, 17):
            with torch.no_grad():
                F.cross_entropy(loop.model(loop.x[TRAINED + step :]), loop.y[TRAINED + step :])

    loop.end = end


def evaluating_once(loop: Loop) -> None:
    evaluating(TRAINED, 128)(loop)
    each_time = loop.end
    loop.end = lambda step: each_time(step) if step < 10 else None


def one_view(loop: Loop) -> None:
    """Always the first part of a larger tensor."""
    loop.batch = lambda step: slice(0, BATCH)  # type: ignore[assignment, return-value]


def one_batch_of_what_is_evaluated(loop: Loop) -> None:
    evaluating(0, 128)(loop)
    loop.batch = lambda step: torch.arange(BATCH)


def the_same_micro_batch(loop: Loop) -> None:
    """Four backward passes of the same rows in each step."""
    train_on_first(loop)

    def before(step: int) -> None:
        rows = loop.batch(step)
        for _ in range(3):
            F.cross_entropy(loop.model(loop.x[rows]), loop.y[rows]).backward()

    loop.before_update = before


def micro_batches(loop: Loop) -> None:
    def before(step: int) -> None:
        for part in range(1, 4):
            rows = (loop.batch(step) + part * BATCH) % 128
            F.cross_entropy(loop.model(loop.x[rows]), loop.y[rows]).backward()

    loop.before_update = before


def overlapping(loop: Loop) -> None:
    loop.batch = lambda step: torch.arange(step * 12, step * 12 + BATCH) % 128


def with_replacement(loop: Loop) -> None:
    loop.batch = lambda step: torch.randint(0, 128, (BATCH,))


def each_batch_twice(loop: Loop) -> None:
    loop.batch = lambda step: torch.arange(step // 2 * BATCH, (step // 2 + 1) * BATCH) % 128


def whole(loop: Loop) -> None:
    """The whole set is one batch."""
    loop.batch = lambda step: torch.arange(128)


def one_large_feature(loop: Loop) -> None:
    loop.x[:, 3] *= 1e4


def far_from_0(loop: Loop) -> None:
    loop.x += 1e3


def one_small_feature(loop: Loop) -> None:
    loop.x[:, 3] *= 1e-4


def growing(loop: Loop) -> None:
    def begin(step: int) -> None:
        loop.x *= 1.5

    loop.begin = begin


def shrinking(loop: Loop) -> None:
    """A running normalisation that divides by what it has divided before."""
    scale = [1.0]

    def begin(step: int) -> None:
        scale[0] *= 2.0
        loop.forward = lambda x: loop.model(x / scale[0])

    loop.begin = begin


def blanked(loop: Loop) -> None:
    def begin(step: int) -> None:
        loop.x = torch.ones_like(loop.x) if step == 4 else loop.x

    loop.begin = begin


DISJOINT = 26
"""So many steps must be compared before rows that steps share are an alarm; alarms of an input come earlier."""

HEALTHY: dict[str, Change] = {
    "evaluation of both": evaluating(0, 128, size=16),
    "evaluation of the training data": evaluating(0, TRAINED),
    "with replacement": with_replacement,
    "each batch twice": each_batch_twice,
    "the whole set": whole,
    "micro-batches": micro_batches,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_the_laws_hold_on_a_healthy_loop(name: str) -> None:
    assert broken(watched(HEALTHY[name], steps=DISJOINT, laws="cheap"), "data") == set()


def test_a_small_feature_is_no_fault() -> None:
    assert broken(watched(one_small_feature, steps=20), "data") == set()


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (one_view, "batches_vary"),
        (one_batch_of_what_is_evaluated, "batches_vary"),
        (the_same_micro_batch, "batches_vary"),
        (overlapping, "batches_are_disjoint"),
        (evaluating(64, 128), "evaluation_is_apart"),
        (evaluating(48, 112, size=16, shuffled=True), "evaluation_is_apart"),
        (evaluating(90, 128), "evaluation_is_apart"),
        (evaluating_once, "evaluation_goes_on"),
        (evaluating_others_each_time, "evaluation_is_the_same"),
    ],
)
def test_a_violation_breaks_its_law(change: Change, law: str) -> None:
    assert law in broken(watched(change, steps=33, laws="cheap"), "data")


@pytest.mark.parametrize(
    ("change", "law", "steps"),
    [
        (one_large_feature, "features_share_a_scale", 12),
        (far_from_0, "features_share_a_scale", 12),
        (growing, "inputs_keep_their_scale", 16),
        (shrinking, "inputs_keep_their_scale", 22),
        (blanked, "inputs_keep_their_scale", 20),
    ],
)
def test_inputs_of_another_scale_break_their_law(change: Change, law: str, steps: int) -> None:
    assert law in broken(watched(change, steps=steps), "data")


def test_what_was_looked_at_is_told() -> None:
    """Of a healthy loop with an evaluation."""
    watch = watched(evaluating(TRAINED, 128), steps=DISJOINT)
    state = states(watch, "data")
    assert broken(watch, "data") == set()
    assert state["batches_vary"].why == "96 rows in 26 steps"
    assert state["evaluation_is_apart"].why == "32 evaluated rows are not trained on"
    assert state["evaluation_is_the_same"].why == "4 evaluations of 32 rows"
    assert state["samples_are_drawn"].state == "not looked at"


class Doubling(Sampler[int]):
    """Draws each of the first half of the samples twice."""

    def __iter__(self) -> Iterator[int]:
        return iter([i // 2 for i in range(128)])

    def __len__(self) -> int:
        return 128


def from_loader(loader: DataLoader[tuple[Tensor, ...]], epochs: int, batches: int) -> tw.Watch:
    """Trains on so many batches of each epoch."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, loader=loader, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(epochs):
            for number, (x, y) in enumerate(loader):
                if number == batches:
                    break
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return watch


def rows() -> TensorDataset:
    x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


@pytest.mark.parametrize(
    ("make", "batches", "state"),
    [
        (lambda: DataLoader(rows(), BATCH, shuffle=True), 8, "held"),
        (lambda: DataLoader(rows(), BATCH, shuffle=True), 2, "held"),
        (lambda: DataLoader(rows(), BATCH, sampler=SubsetRandomSampler(range(64))), 8, "not applicable"),
        (lambda: DataLoader(rows(), BATCH), 3, "broken"),
        (lambda: DataLoader(rows(), BATCH, sampler=Doubling()), 4, "broken"),
    ],
)
def test_what_a_loader_draws(make: Callable[[], DataLoader[tuple[Tensor, ...]]], batches: int, state: str) -> None:
    assert states(from_loader(make(), 3, batches), "data")["samples_are_drawn"].state == state


def test_a_loader_that_was_given_and_is_not_read() -> None:
    given, other = DataLoader(rows(), BATCH, shuffle=True), DataLoader(rows(), BATCH, shuffle=True)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, loader=given, out=None, quiet=True, laws="cheap") as watch:
        for x, y in [*other, *other]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert "given_loader_is_read" in broken(watch, "data")


def test_the_first_batch_of_a_loader_again_and_again() -> None:
    watch = from_loader(DataLoader(rows(), BATCH), 12, 1)
    assert "of 128" in found(watch, "law.data.batches_vary").symptom


def trained_on(*loops: Sequence[int]) -> set[str]:
    """What is broken where each loop trains on the parts with these numbers, in their order."""
    torch.manual_seed(0)
    parts, model = torch.randn(4 * BATCH, WIDTH).split(BATCH), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :CLASSES].argmax(1)).backward()
        optimizer.step()

    first, *rest = loops
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for number in first:
            step(parts[number])
        for number in rest[0] if rest else ():
            step(parts[number])
    return broken(watch, "data")


def test_a_loop_that_stays_at_one_batch_after_all_were_read() -> None:
    """Not so a loop of its own on one batch, or one that takes as many steps on every batch."""
    every, one = [0, 1, 2, 3] * 4, [0] * 20
    assert "batches_vary" in trained_on(every + one)
    assert "batches_vary" not in trained_on(every, one)
    assert "batches_vary" not in trained_on(sorted(every * 3))


def test_one_sample_without_a_batch_has_no_rows() -> None:
    """One-hot samples are the same numbers in another order."""
    torch.manual_seed(0)
    model, fields = net(0.0), torch.eye(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(24):
            if step % 8 == 7:
                with torch.no_grad():
                    model(fields[0])
                    model(fields)
            optimizer.zero_grad()
            F.cross_entropy(model(fields[step % 5]), torch.tensor(step % 5 % CLASSES)).backward()
            optimizer.step()
    assert "batches_vary" not in broken(watch, "data")


def test_walks_may_begin_at_one_place() -> None:
    """The rows of a step's first call are the same place, in every step; those of the others are drawn."""
    torch.manual_seed(0)
    model, start = net(0.0), torch.zeros(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(24):
            if step % 8 == 7:
                with torch.no_grad():
                    model(torch.cat([start[:1], torch.randn(64, WIDTH)]))
            at = start + torch.randn(BATCH, WIDTH) * model(start).detach().exp().sum(1, keepdim=True)
            optimizer.zero_grad()
            (model(start) - model(at)).square().mean().backward()
            optimizer.step()
    assert "batches_vary" not in broken(watch, "data")


def test_a_number_within_the_batch_is_no_content() -> None:
    """As the vector that says which graph a node belongs to."""
    x, graphs = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    other = torch.cat([x[4:], x[:4]])
    one, again = row_digests([x, graphs]), row_digests([other, graphs])
    assert one is not None and again is not None
    assert sorted(one.tolist()) == sorted(again.tolist())
    assert len(set(row_digests([graphs, x[:, 0]]).tolist())) == 6  # type: ignore[union-attr]


def test_equal_rows_have_equal_digests() -> None:
    x = torch.randn(6, 200)
    tokens = (torch.arange(6) + 1) % 3
    one, other = row_digests([x, tokens]), row_digests([x.flip(0), tokens.flip(0)])
    assert one is not None and other is not None
    assert one.tolist() == other.tolist()[::-1]
    assert len(set(one.tolist())) == 6
    changed = row_digests([x, tokens + 1])
    assert changed is not None and not set(changed.tolist()) & set(one.tolist())
    assert row_digests([torch.tensor(3.0)]) is None
    assert isinstance(net(), nn.Module)


@pytest.mark.parametrize(
    ("prepare", "state", "dtype"),
    [
        (lambda x: x, "held", torch.bfloat16),
        (lambda x: x + 0.5 * torch.randn_like(x), "held", torch.float32),
        (lambda x: x * (torch.rand_like(x) > 0.3), "held", torch.float32),
        (lambda x: 20 * x, "broken", torch.bfloat16),
        (lambda x: x + 3, "broken", torch.float32),
        (lambda x: (x - 2) / 5, "broken", torch.float32),
        (lambda x: x[:8], "not applicable", torch.float32),
    ],
)
def test_evaluated_inputs_are_as_those_of_training(
    prepare: Callable[[Tensor], Tensor], state: str, dtype: torch.dtype
) -> None:
    def change(loop: Loop) -> None:
        train_on_first(loop)

        def end(step: int) -> None:
            if step == 11:
                with torch.no_grad():
                    rows = prepare(loop.x[TRAINED:])
                    F.cross_entropy(loop.model(rows).float(), loop.y[TRAINED : TRAINED + len(rows)])

        loop.end = end

    assert states(watched(change, dtype=dtype, laws="cheap"), "data")["evaluation_is_alike"].state == state


@pytest.mark.parametrize(("every", "state"), [(1, "held"), (2, "broken"), (4, "broken"), (9, "not looked at")])
def test_a_model_is_called_for_each_batch_of_an_evaluation(every: int, state: str) -> None:
    """At 9 it is not called at all: the pass is no evaluation of it."""
    loader = DataLoader(rows(), BATCH)

    def change(loop: Loop) -> None:
        def end(step: int) -> None:
            if step % 5 == 4:
                with torch.no_grad():
                    for number, (x, y) in enumerate(loader):
                        if every < 9 and number % every == 0:
                            out = loop.model(x)
                        if every < 9:
                            (out.argmax(1) == y).sum()

        loop.end = end

    assert states(watched(change, laws="cheap"), "data")["evaluated_batches_are_used"].state == state
