"""``profile RECIPE|RUN``: trains a few steps, finds what bounds them, and tries remedies."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainwright.checkpoint.train_state import TrainState
from trainwright.commands.profile_trials import Trials
from trainwright.engine.observer import Observer, Stop
from trainwright.engine.step import StepResult
from trainwright.errors import UsageError
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.terminal import Console
from trainwright.plan.parallel import in_one_process
from trainwright.plan.trace.local_device import local_device
from trainwright.profiling.audit import audit
from trainwright.profiling.facts import ProfileFacts
from trainwright.profiling.session import TIMED_S, ProfileSession
from trainwright.profiling.verdict import Advice, judge
from trainwright.profiling.words import Profile, TriedAdvice
from trainwright.report.pages.report import write_report
from trainwright.runs.folder import RunFolder
from trainwright.training.job import Job
from trainwright.training.run import process_settings, train
from trainwright.training.subject import Build

TRACE = "profile.json.gz"
NAME = "profile.json"


@dataclass(frozen=True)
class ProfiledRun:
    """The profile, and the run folder with the trace and the page."""

    folder: Path
    profile: Profile
    exit_code = 0

    def lines(self) -> list[str]:
        """Return the text output."""
        trace = self.folder / "traces" / TRACE
        return [*self.profile.lines(), f"trace     {trace}  (ui.perfetto.dev opens it)", f"folder    {self.folder}"]

    def to_json(self) -> Mapping[str, object]:
        """Return the object that ``--json`` prints."""
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

    Args:
        build: Makes the recipe and its objects.
        for_s: Seconds of timing at full speed.
        budget_s: Seconds for trying remedies; 0 tries none.
        audits: Compare the kernels that ran with those that the recipe asks for.
        console: The output.
    """
    console = console or Console()
    loaded, parts = build(())
    loaded = in_one_process(loaded)
    log = loaded.recipe.log.model_copy(
        update={"doctor": False}
    )  # the doctor spends most of its time budget early in a run
    recipe = loaded.recipe.model_copy(update={"name": f"{loaded.recipe.name}-profile", "log": log})
    observers: list[ProfileObserver] = []

    def listen(job: Job, folder: RunFolder, progress: Progress) -> Observer:
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
        tried = tuple(_tried(build, seen.job, verdict.advice, budget_s, console))
    rows = audit(facts, on_gpu=seen.job.device.type == "cuda") if audits else ()
    found = Profile(facts, verdict, tried, rows)
    folder.write_json(NAME, found.to_json())
    with suppress(Exception):
        write_report([folder.path])
    return ProfiledRun(folder.path, found)


def _tried(
    build: Build, job: Job, advice: Sequence[Advice], budget_s: float, console: Console
) -> Iterator[TriedAdvice]:
    if budget_s > 0 and advice:

        def show(line: str) -> None:
            console.print(line, highlight=False, markup=False, emoji=False)

        trials = Trials(build, job, budget_s, show)
        yield from trials.of(advice)


class ProfileObserver:
    """Ends the run when everything is measured, without saving."""

    def __init__(self, job: Job, folder: RunFolder, for_s: float) -> None:
        self.job = job
        roots = [job.parts.model]
        self._session = ProfileSession(roots, trace=folder.traces / TRACE, for_s=for_s)
        self._thread = threading.get_ident()

    def observe(self, result: StepResult, state: TrainState) -> Stop | None:
        self._session.mark()
        return Stop("all is measured", save=False) if self._session.done else None

    def close(self) -> None:
        self._session.close()

    def facts(self) -> ProfileFacts | None:
        """Return the measurements."""
        plan, recipe = self.job.plan, self.job.recipe
        fused = [bool(group.get("fused")) for group in self.job.state.optimizer.param_groups if "fused" in group]
        return self._session.facts(
            device=_name_of(self.job.device),
            precision=plan.precision,
            workers=recipe.data.workers,
            fused=all(fused) if fused else None,
            compiled=recipe.model.compile,
        )


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
