"""Measures what a rank tells of its steps, in a loop that somebody else owns."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import deque

import torch

from trainwright.doctor.facts.ranks import FOLDS, ExchangeFacts, NonfiniteFacts, RanksFacts, RankStep
from trainwright.doctor.measure.ranks.alarm import findings_of, raise_alarm
from trainwright.doctor.measure.ranks.exchange import Exchange, Site
from trainwright.doctor.measure.ranks.listen import StepListener, StepSoFar
from trainwright.doctor.measure.ranks.reduction import is_divided_again
from trainwright.doctor.measure.ranks.replica import EVERY, RowSums, is_due
from trainwright.doctor.measure.ranks.traits import traits_of
from trainwright.errors import text_of
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep, constants_of
from trainwright.recorder.ranks import has_others, num_collectives
from trainwright.runlog.json_values import Facts, strict

_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_WATCHES = itertools.count()


def make_ranks_probe(watched: WatchedObjects) -> Probe | None:
    """The probe of a loop that is one of several; None for a process alone."""
    return RanksProbe(watched) if has_others() else None


class RanksProbe(StepListener):
    """Tells the other ranks of this one's steps, and returns what came of the comparison.

    ``urgent``: the comparison has found something new.
    """

    def __init__(self, watched: WatchedObjects) -> None:
        super().__init__(watched)
        self._patience_s = watched.patience_s
        self._unread: dict[int, tuple[RankStep, RowSums]] = {}
        self._seconds: deque[tuple[float, float]] = deque(maxlen=EVERY)  # by itself, and of the whole step
        self._seen: RanksFacts | None = None
        self._told: RanksFacts | None = None
        self._codes: set[str] = set()

    # begin and end

    def begin(self, site: WatchSite) -> None:
        number = next(_WATCHES)
        place = Site(site.folder, lambda facts: raise_alarm(facts, site.write, site.say))
        try:
            meeting, patience_s = self._replica.meeting(), self._patience_s
            exchange = Exchange(f"watch/{number}", meeting, place, number=number, patience_s=patience_s)
        except RuntimeError:
            return  # a store that no other process can reach: each rank is watched by itself
        exchange.post(self._replica.first_row(exchange.rank))
        self._exchange = exchange

    def end(self, error: BaseException | None) -> None:
        if self._exchange is None:
            return
        text = "finished" if error is None else text_of(error)[:300]
        missing = _UNUSED.search(str(error or ""))
        trained = [name for name, p in zip(self._replica.names, self._parameters) if p.requires_grad]
        unused = tuple(trained[int(n)] for n in missing[1].split() if int(n) < len(trained)) if missing else ()
        self._exchange.close(text, unused, wait=error is None or isinstance(error, Exception))

    def on_forked(self) -> None:
        self._exchange = None  # its thread is not in the fork

    # the end of a step

    def on_closed(self, step: RecordedStep) -> None:
        so_far, self._step = self._step, StepSoFar()
        self._steps = step.step
        self._at("between")
        whole_s = float(step.values.get("step_s", 0.0))
        self._seconds.append((max(0.0, whole_s - so_far.joint_s), whole_s))
        if self._exchange is None:
            return
        weights = self._replica.after_update(step.step, whole_s)
        if is_due(step.step):
            moments, reduced = self._replica.moments(), so_far.reduced
            sums = RowSums(weights, so_far.gradients, so_far.inputs, so_far.buffers, moments, reduced)
            self._unread[step.step] = (self._row(step, so_far), sums)
        self._look_at(self._exchange.facts)

    def _look_at(self, facts: RanksFacts | None) -> None:
        """Asks for a look where the comparison has found something new."""
        if facts is None or facts is self._seen:
            return
        self._seen = facts
        found = {each.code for each in findings_of(facts)}
        self.urgent = self.urgent or not found <= self._codes
        self._codes |= found

    def _row(self, step: RecordedStep, so_far: StepSoFar) -> RankStep:
        """The row of a step but for its checksums."""
        assert self._exchange is not None
        own, whole = zip(*self._seconds)
        self._seconds.clear()
        is_own = self._replica.has_own_data
        is_known = is_own and bool(step.ids) and all(of_batch is not None for of_batch in step.ids)
        return RankStep(
            rank=self._exchange.rank,
            step=step.step,
            groups=self._replica.groups(),
            micro_batches=so_far.micro_batches,
            samples=samples_of(step) if is_known else (),
            rng=so_far.first_rng if is_own else None,
            draws=so_far.draws,
            factor=so_far.factor,
            program=traits_of(step),
            summed=self._sums.are_undivided(step, self._exchange.size),
            shrunk=so_far.last_synced and is_divided_again(step, self._exchange.size, so_far.micro_batches),
            without_gradient=tuple(so_far.missing[:FOLDS]),
            exchange=ExchangeFacts(
                calls=so_far.calls,
                wrapped_calls=so_far.wrapped,
                synced_calls=so_far.synced,
                last_synced=so_far.last_synced,
                collectives=num_collectives() - so_far.collectives,
            ),
            steps=len(own),
            own_s=statistics.median(own),
            step_s=statistics.median(whole),
        )

    def on_read(self, step: RecordedStep, numbers: Numbers) -> None:
        if self._exchange is None:
            return
        if (unread := self._unread.pop(step.step, None)) is not None:
            self._exchange.post(self._replica.completed(*unread))
        if changes := self._replica.changes(step.step):
            self._exchange.tell_changes(changes)
        if not numbers.are_finite and numbers.losses:
            bad = [loss for loss in numbers.losses if not math.isfinite(loss)]
            own, finite = (bad or numbers.losses)[0], _inputs_are_finite(step)
            found = NonfiniteFacts(step=step.step, own_loss=own, inputs_finite=finite, samples=samples_of(step)[:64])
            self._exchange.tell_nonfinite(found)

    def values(self) -> Facts | None:
        self.urgent = False
        facts = self._exchange.facts if self._exchange is not None else None
        if facts is self._told:
            return None
        self._told = facts
        return None if facts is None else strict(vars(facts))


def samples_of(step: RecordedStep) -> tuple[int, ...]:
    """Sample ids of the step, as far as they are known; at most 256."""
    return tuple([i for of_batch in step.ids for i in of_batch or ()][:256])


def _inputs_are_finite(step: RecordedStep) -> bool:
    inputs = [each.tensor for call in step.calls for each in constants_of((call.args, call.kwargs))]
    return all(bool(torch.isfinite(each).all()) for each in inputs if each.is_floating_point())
