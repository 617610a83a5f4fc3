"""Reports of one rank on its copy of the model: checksums of weights, gradients, buffers; hyperparameters."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor, distributed
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainwright.checkpoint.checksums import Checksums, no_checksums, start_checksums
from trainwright.checkpoint.names import named_parameters
from trainwright.checkpoint.shards import divides_layers
from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.doctor.facts.ranks import FOLDS, RankStep, WeightsChange
from trainwright.doctor.measure.ranks.compare import is_power_of_two
from trainwright.doctor.measure.ranks.exchange import Meeting

EARLY_STEPS = (1, 2, 3, 4, 6, 8, 12, 24)
"""Steps that every rank reports. They are fixed, so that the ranks need no agreement.

Every INTERVAL_STEPS-th step is also reported; from step 512 on, every LATER_INTERVAL_STEPS-th instead. A straggler
shows in three reports that cover at least 4 steps each: the first three are those of steps 12, 16 and 24.
"""
INTERVAL_STEPS = 16
LATER_INTERVAL_STEPS = 64
CHECKED_UPDATES = 64  # After each update until this one, checksums of the weights are kept until the next update
MAX_TIME_FRACTION = 0.01  # Fraction of the time that later checksums may take

T = TypeVar("T")
KnownSums = Callable[[], Sequence[int | None]]
"""Returns checksums as ``Checksums`` does; None for a missing tensor, or one that may differ between ranks."""


def is_due(step: int) -> bool:
    """Returns True if the ranks report this step."""
    return step in EARLY_STEPS or step % (INTERVAL_STEPS if step < 512 else LATER_INTERVAL_STEPS) == 0


@dataclass
class RowSums:
    """Functions that read the checksums of a row. ``gradients`` has one function for each update of the step."""

    weights: Checksums = no_checksums
    gradients: list[Checksums] = field(default_factory=list)
    inputs: Checksums = no_checksums
    buffers: KnownSums = no_checksums
    moments: KnownSums = no_checksums
    reduced: Checksums = no_checksums
    replayed: Sequence[Checksums] = ()


class Replica:
    """The model of this rank. ``is_split``: the model is sharded, and no checksums are compared.

    ``has_own_data``: no other rank is meant to use the same samples and random numbers.
    """

    def __init__(self, subject: LiveObjects, *, is_split: bool = False) -> None:
        self._subject = subject
        named = {id(p): name for name, p in named_parameters(subject.roots)}
        self.parameters = list(subject.parameters)
        self.names = [named.get(id(p), f"<not in the model {n}>") for n, p in enumerate(self.parameters)]
        self.is_split = is_split or any(is_traceable_wrapper_subclass(p) for p in self.parameters)
        self.has_own_data = not any(divides_layers(root) for root in subject.roots)
        self._buffers_at_begin = self._buffers()()
        self._since: tuple[int, Checksums] | None = None  # weights after the last update
        self._pairs: list[tuple[int, Checksums, Checksums]] = []  # after an update, and before the next one
        self._cost_s = 0.0

    def meeting(self) -> Meeting:
        """Returns the meeting of this rank, which identifies comparable ranks."""
        shapes = repr([(name, *p.shape) for name, p in zip(self.names, self.parameters)])
        begun = distributed.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        return Meeting(folded_names(self.names), hashlib.sha256(shapes.encode()).hexdigest()[:16], begun)

    def first_row(self, rank: int) -> RankStep:
        return RankStep(rank=rank, step=0, weights=() if self.is_split else folded(self._weights()()))

    def gradients(self, optimizer: Optimizer) -> Checksums:
        """Returns checksums of the gradients that ``optimizer`` uses; 0 for other parameters."""
        if self.is_split:
            return no_checksums
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return start_checksums([p.grad if id(p) in owned else None for p in self.parameters])

    def groups(self) -> tuple[dict[str, float], ...]:
        """Returns the numbers in the optimizers' parameter groups."""
        groups = [group for optimizer in self._subject.optimizers for group in optimizer.param_groups]
        return tuple(_numbers_in(group) for group in groups[:8])

    def moments(self) -> KnownSums:
        """Returns checksums of the optimizer state of each parameter."""
        if self.is_split:
            return no_checksums
        kept: list[list[Tensor]] = []
        for parameter in self.parameters:
            states = [optimizer.state.get(parameter, {}) for optimizer in self._subject.optimizers]
            kept.append([value for state in states for value in state.values() if isinstance(value, Tensor)])
        read = start_checksums([each for of_one in kept for each in of_one])

        def by_parameter() -> list[int | None]:
            sums = iter(read())
            return [sum(next(sums) for _ in of_one) if of_one else None for of_one in kept]

        return by_parameter

    def after_update(self, step: int, step_s: float, *, is_due: bool = False) -> Checksums:
        """Starts checksums of the weights if the step is due or ``before_update`` needs them. Returns a reader."""
        every = max(1, math.ceil(2 * self._cost_s / (MAX_TIME_FRACTION * max(step_s, 1e-6))))
        keeps = step <= CHECKED_UPDATES or step % every == 0
        if self.is_split or not (keeps or is_due):
            return no_checksums
        begin_s = time.perf_counter()
        weights = self._weights()
        self._cost_s = time.perf_counter() - begin_s
        self._since = (step, weights) if keeps else None
        return weights

    def buffers(self, *, without_statistics: bool) -> KnownSums:
        """Returns checksums of the buffers; None for those that may differ between ranks.

        These are the running statistics if ``without_statistics``, else all buffers that have changed since the start.
        """
        if self.is_split:
            return no_checksums
        read, begin = self._buffers(), self._buffers_at_begin
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        every = self._subject.buffers()
        own = [bool(getattr(m, "track_running_stats", False)) and name in statistics for m, name in every]
        if without_statistics:
            return lambda: [None if is_own else now for now, is_own in zip(read(), own)]
        return lambda: [now if now == then else None for now, then in zip(read(), begin)]

    def before_update(self, *, is_due: bool = False) -> Checksums:
        """Starts checksums of the weights if ``is_due`` or ``after_update`` has kept earlier ones. Returns a reader."""
        if self.is_split or (self._since is None and not is_due):
            return no_checksums
        weights = self._weights()
        if self._since is not None:
            self._pairs.append((*self._since, weights))
            self._since = None
        return weights

    def changes(self, step: int) -> list[WeightsChange]:
        """Returns weights that changed between two updates before ``step``: the first four for each pair of updates."""
        done = [each for each in self._pairs if each[0] < step]
        self._pairs = [each for each in self._pairs if each[0] >= step]
        found: list[WeightsChange] = []
        for at, before, after in done:
            differing = [(n, b - a) for n, a, b in zip(self.names, before(), after()) if a != b]
            is_flip = len(differing) == 1 and is_power_of_two(differing[0][1])
            found += [WeightsChange(step=at, parameter=name, one_bit=is_flip) for name, _ in differing[:4]]
        return found

    def completed(self, row: RankStep, sums: RowSums) -> RankStep:
        inputs = sums.inputs() if self.has_own_data else []
        return replace(
            row,
            weights=folded(sums.weights()),
            gradients=folded([sum(column) for column in zip(*(each() for each in sums.gradients))]),
            reduced=folded(sums.reduced()),
            replayed=tuple(folded(each()) for each in sums.replayed),
            moments=folded_known(sums.moments()),
            buffers=tuple(sums.buffers()),
            batch=hash(tuple(inputs)) if inputs else None,
        )

    def _weights(self) -> Checksums:
        return start_checksums(self.parameters)

    def _buffers(self) -> Checksums:
        return start_checksums([module._buffers[name] for module, name in self._subject.buffers()])


def folded(sums: Sequence[int]) -> tuple[int, ...]:
    """Returns at most FOLDS numbers, sums of neighbours modulo 2**64."""
    return tuple((sum(run) + 2**63) % 2**64 - 2**63 for run in _runs(sums))


def folded_known(sums: Sequence[int | None]) -> tuple[int | None, ...]:
    """Returns the sums of ``folded``; None for each sum with an unknown summand."""
    known = folded([each or 0 for each in sums])
    return tuple(None if None in run else each for run, each in zip(_runs(sums), known))


def folded_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that belong to the numbers of ``folded``."""
    return tuple(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in _runs(names))


def _runs(values: Sequence[T]) -> list[Sequence[T]]:
    width = max(1, math.ceil(len(values) / FOLDS))
    return [values[at : at + width] for at in range(0, len(values), width)]


def _numbers_in(group: Mapping[str, object]) -> dict[str, float]:
    values = {n: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for n, v in group.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
