"""Tries the remedies of a profile: trains the recipe with and without each, alternating blocks of steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from trainwright.checkpoint.rng import seed_all
from trainwright.engine.loop import steps
from trainwright.engine.run_length import for_steps
from trainwright.errors import OutOfMemoryError, TrainwrightError
from trainwright.plan.explain import human_seconds
from trainwright.plan.parallel import in_one_process
from trainwright.profiling.pairs import MIN_ROUNDS, ROUNDS, SpeedUp, compare_timings
from trainwright.profiling.verdict import Advice
from trainwright.profiling.words import TriedAdvice
from trainwright.training.job import Job, make_advance, prepare
from trainwright.training.subject import Build

BLOCK_S = 0.1
"""Minimum seconds of a block of more than one step."""
MAX_STEPS_PER_BLOCK = 100
WARM_STEPS = 4
MAX_OVERRUN_FRACTION = 0.25
"""Fraction of the budget by which a trial may exceed it. Its preparation (compiling, starting workers) may need all of
the budget, and the measurement is short in comparison."""
COMPILES = "model.compile=true"


def num_rounds(round_s: float, left_s: float, budget_s: float, later: int) -> int:
    """Return the number of rounds for a trial; 0 if not even the minimum fits. ``later`` trials share the remaining
    time.
    """
    if MIN_ROUNDS * round_s > max(0.0, left_s) + MAX_OVERRUN_FRACTION * budget_s:
        return 0
    return max(MIN_ROUNDS, min(ROUNDS, int(left_s / (1 + later) / round_s)))


class Trials:
    """Tries one remedy after the other while ``budget_s`` lasts. ``build`` makes the run with further settings.

    A block has the number of steps that take ``block_s``, at least one.
    """

    def __init__(
        self,
        build: Build,
        job: Job,
        budget_s: float,
        say: Callable[[str], None],
        *,
        block_s: float = BLOCK_S,
    ) -> None:
        self._build = build
        self._job = job
        self._say = say
        self._block_s = block_s
        self._budget_s, self._end_s = budget_s, time.perf_counter() + budget_s

    def of(self, advice: Sequence[Advice]) -> list[TriedAdvice]:
        """Return the advice with the result of each trial. Compiling takes longest to prepare and is tried last."""
        found: dict[int, TriedAdvice] = {}
        order = sorted(range(len(advice)), key=lambda n: COMPILES in advice[n].settings)
        for done, n in enumerate(order):
            found[n] = self._tried(advice[n], later=len(order) - done - 1)
        return [found[n] for n in range(len(advice))]

    def _tried(self, advice: Advice, later: int) -> TriedAdvice:
        if not advice.settings:
            return TriedAdvice(advice, None, "")
        self._say(f"trying {advice.name} ...")
        try:
            seen, why_not = self._try(advice, later)
        except (TrainwrightError, StopIteration, RuntimeError) as error:
            is_large = isinstance(error, OutOfMemoryError | torch.OutOfMemoryError)
            text = "does not fit into memory" if is_large else f"{type(error).__name__}: {error}"
            seen, why_not = None, " ".join(text.split())[:160]
        return TriedAdvice(advice, seen, why_not)

    def _try(self, advice: Advice, later: int) -> tuple[SpeedUp | None, str]:
        """Return the speed-up, or the reason for none. ``later`` is the number of trials that follow."""
        if COMPILES in advice.settings and self._job.device.type == "cpu" and not shutil.which("g++"):
            return None, "torch.compile needs a C++ compiler here"
        if time.perf_counter() > self._end_s:
            return None, "the time for trials is used up (--budget)"
        plan = self._job.plan
        fixed = [f"precision={plan.precision}"]
        settings = [*fixed, *(each for each in advice.settings if "=" in each)]
        if "batch x 2" in advice.settings:
            settings.append(f"batch.size={2 * plan.batch.size}")
        base, other = self._variant(fixed), self._variant(settings)
        if "channels-last" in advice.settings:
            other.job.parts.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        settle = max(base.ahead, other.ahead)
        base.warm(WARM_STEPS + settle)
        other.warm(WARM_STEPS + settle)
        of_both_s = base.settle(settle, 1) + other.settle(settle, 1)
        left_s = self._end_s - time.perf_counter()
        rounds = num_rounds(2 * of_both_s, left_s, self._budget_s, later)
        if not rounds:
            left = f"{human_seconds(left_s)} are left" if left_s > 0 else "the time for trials is used up"
            return (
                None,
                f"{MIN_ROUNDS} rounds of it would take {human_seconds(2 * MIN_ROUNDS * of_both_s)}, {left} (--budget)",
            )
        return compare_timings(base.block, other.block, rounds), ""

    def _variant(self, settings: Sequence[str]) -> _Variant:
        loaded, parts = self._build(settings)
        self._job.matmul.set()  # another variant may have changed it
        return _Variant(prepare(in_one_process(loaded), parts), self._job.plan.threads, self._block_s)


class _Variant:
    """A live run of a recipe that is advanced block by block."""

    def __init__(self, job: Job, threads: int, block_s: float) -> None:
        self.job = job
        self._threads = threads
        self._block_s = block_s
        seed_all(job.recipe.seed)
        self._advance = make_advance(job)
        self._results = steps(job.state, job.batches, self._advance, until=for_steps(10**9))
        workers = job.recipe.data.workers
        self.ahead = workers * (job.recipe.data.prefetch or 2) if workers else 0
        self._settle, self._count = 0, 1

    def warm(self, count: int) -> None:
        """Advance without a measurement."""
        self._set()
        for _ in islice(self._results, count):
            pass

    def settle(self, settle: int, count: int) -> float:
        """Choose the length of a block and return the seconds of a full block.

        ``settle`` steps precede each block to use up what workers have read ahead.
        """
        self._settle, self._count = settle, count
        begin_s = time.perf_counter()
        self.block()
        step_s = (time.perf_counter() - begin_s) / (settle + count)
        self._count = max(1, min(MAX_STEPS_PER_BLOCK, round(self._block_s / step_s)))
        return step_s * (settle + self._count)

    def block(self) -> float:
        """Train a block and return the seconds per sample."""
        self.warm(self._settle)
        seconds, samples = 0.0, 0
        for result in islice(self._results, self._count):
            seconds += result.step_s
            samples += result.batch.size
        if not samples:
            raise StopIteration("the data are used up")
        return seconds / samples

    def _set(self) -> None:
        torch.set_num_threads(self._threads)
        self.job.matmul.set()
