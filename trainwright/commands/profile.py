"""``profile RECIPE|RUN``: trains a few steps, finds what bounds them, and tries remedies."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from trainwright.checkpoint.rng import seed_all
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loop import for_steps, steps
from trainwright.engine.observer import Observer, Stop
from trainwright.engine.step import StepResult
from trainwright.errors import OutOfMemoryError, TrainwrightError, UsageError
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.terminal import Console
from trainwright.plan.amounts import human_seconds
from trainwright.plan.parallel import in_one_process
from trainwright.plan.trace.local_device import local_device
from trainwright.profiling.audit import audit
from trainwright.profiling.session import TIMED_S, ProfileSession
from trainwright.profiling.verdict import Advice, ProfileFacts, judge
from trainwright.profiling.words import MIN_ROUNDS, ROUNDS, Profile, SpeedUp, TriedAdvice, compare_timings
from trainwright.report.pages.report import write_report
from trainwright.runs.folder import RunFolder
from trainwright.training.job import Job, make_advance
from trainwright.training.prepare import prepare
from trainwright.training.run import process_settings, train
from trainwright.training.subject import Build

BLOCK_S = 0.1
"""Approximate seconds of a block of several steps."""
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

    A block has the number of steps that take about ``block_s``, at least one and at most ``MAX_STEPS_PER_BLOCK``.
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
        """Choose the length of blocks by a first one of ``count`` steps, and return the seconds of a full block.

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


TRACE = "profile.json.gz"
NAME = "profile.json"


@dataclass(frozen=True)
class ProfiledRun:
    """The profile, and the run folder with the trace and the report."""

    folder: Path
    profile: Profile
    exit_code = 0

    def lines(self) -> list[str]:
        trace = self.folder / "traces" / TRACE
        return [*self.profile.lines(), f"trace     {trace}  (ui.perfetto.dev opens it)", f"folder    {self.folder}"]

    def to_json(self) -> Mapping[str, object]:
        return {"run": str(self.folder), **self.profile.to_json()}


def profile(
    build: Build,
    *,
    for_s: float = TIMED_S,
    budget_s: float = 60.0,
    audits: bool = False,
    console: Console | None = None,
) -> ProfiledRun:
    """Train the beginning of the run that ``build`` makes, in a separate run folder.

    Steps are timed at full speed for ``for_s`` seconds. Remedies are tried for ``budget_s`` seconds. With ``audits``,
    the kernels that ran are compared with those that the recipe requests.
    """
    console = console or Console()
    loaded, parts = build(())
    loaded = in_one_process(loaded)
    log = loaded.recipe.log.model_copy(update={"doctor": False})  # it spends most of its time early in a run
    recipe = loaded.recipe.model_copy(update={"name": f"{loaded.recipe.name}-profile", "log": log})
    observers: list[ProfileObserver] = []

    def listen(job: Job, folder: RunFolder, _progress: Progress) -> Observer:
        observers.append(ProfileObserver(job, folder, for_s))
        return observers[0]

    result = train(replace(loaded, recipe=recipe), parts=parts, console=console, quiet=True, extras=[listen])
    folder, seen = RunFolder.open(result.run), observers[0]
    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # nobody resumes this run
    facts = seen.facts()
    if facts is None:
        raise UsageError(
            f"the run was over after {result.step} steps, before any could be timed",
            remedy="profile with a longer until",
        )
    with process_settings():
        torch.set_num_threads(seen.job.plan.threads)
        device = local_device()
        verdict = judge(facts, device)
        tried = [TriedAdvice(each, None, "") for each in verdict.advice]
        if budget_s > 0:
            show = partial(console.print, highlight=False, markup=False, emoji=False)
            tried = Trials(build, seen.job, budget_s, show).of(verdict.advice)
    rows = audit(facts, on_gpu=seen.job.device.type == "cuda") if audits else ()
    found = Profile(facts, verdict, tuple(tried), rows)
    folder.write_json(NAME, found.to_json())
    with suppress(Exception):
        write_report([folder.path])
    return ProfiledRun(folder.path, found)


class ProfileObserver:
    """Ends the run when everything is measured, without saving."""

    def __init__(self, job: Job, folder: RunFolder, for_s: float) -> None:
        self.job = job
        roots = [job.parts.model]
        self._session = ProfileSession(roots, trace=folder.traces / TRACE, for_s=for_s)

    def observe(self, _result: StepResult, _state: TrainState) -> Stop | None:
        self._session.mark()
        return Stop("all is measured", save=False) if self._session.done else None

    def close(self) -> None:
        self._session.close()

    def facts(self) -> ProfileFacts | None:
        """Return the measurements."""
        plan, recipe, device = self.job.plan, self.job.recipe, self.job.device
        fused = [bool(group.get("fused")) for group in self.job.state.optimizer.param_groups if "fused" in group]
        return self._session.facts(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU",
            precision=plan.precision,
            workers=recipe.data.workers,
            fused=all(fused) if fused else None,
            compiled=recipe.model.compile,
        )
