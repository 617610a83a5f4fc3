"""Counts the length of an epoch of data without a length, by reading them once before the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from trainwright.data.generators import HeldGenerators, prepare_epoch, seeded
from trainwright.data.ready_batches import PROGRESS_S, Pass, ReadyBatches, silent
from trainwright.data.unwrap import Unwrapped
from trainwright.errors import Problem, RecipeError
from trainwright.plan.make import RunFacts

MAX_COUNTING_S = 120.0
"""Maximum time for counting an epoch, in seconds: some streams never end."""


def with_epoch_counted(facts: RunFacts, data: Unwrapped, path: str, seed: int, say: Callable[[str], None]) -> RunFacts:
    """Return ``facts`` with the length of an epoch, if the data have none.

    ``path`` is the path of the recipe's field that is in epochs; "" if there is none.

    Raises:
        RecipeError: The data can be iterated only once, or do not end in time.
    """
    own = facts.own_batches
    is_known = facts.train_samples is not None or (own is not None and own.count is not None)
    if is_known or not path:
        return facts
    if isinstance(data.dataset, ReadyBatches) and data.dataset.once:
        raise _unknown(path, "one whose data can be iterated once cannot be counted before it")
    begin_s = reported_s = time.monotonic()
    counted = 0
    for counted, _ in enumerate(_epoch(data, seed), start=1):
        now_s = time.monotonic()
        if now_s - begin_s > MAX_COUNTING_S:
            raise _unknown(path, f"after {counted:,} {_unit(data)} in {MAX_COUNTING_S:g} s there was no end of one")
        if now_s - reported_s > PROGRESS_S:
            reported_s = now_s
            say(f"counting an epoch: {counted:,} {_unit(data)} so far")
    took = f"{counted:,} {_unit(data)}, counted in {time.monotonic() - begin_s:.2g} s"
    say(f"epoch       {took}: {path} is in epochs, and the data have no length")
    return (
        replace(facts, train_samples=counted)
        if own is None
        else replace(facts, own_batches=replace(own, count=counted))
    )


def _epoch(data: Unwrapped, seed: int) -> Iterator[object]:
    """Yield the batches, or the samples, of the first epoch. Random generators are restored."""
    if isinstance(data.dataset, ReadyBatches):
        with HeldGenerators([data.dataset.source]).preserved():
            one = Pass(data.dataset, seed, 0, silent)
            while (batch := one.next()) is not None:
                yield batch
        return
    if data.order is not None:  # its positions are drawn, but no sample is read
        with HeldGenerators([data.order.sampler]).preserved():
            for ids in data.order.batches(seed, 0):
                yield from [ids] if data.order.in_batches else ids
        return
    with seeded(seed):
        prepare_epoch(data.dataset, seed, 0)
        yield from data.dataset


def _unit(data: Unwrapped) -> str:
    return "samples" if data.own_batches is None else "batches"


def _unknown(path: str, why: str) -> RecipeError:
    remedy = "give it in steps, samples, tokens or seconds, or data that can be iterated again: a list, a loader, "
    remedy += "a function without arguments that makes the iterator"
    return RecipeError(Problem(path, f"is in epochs, and {why}", remedy=remedy))
