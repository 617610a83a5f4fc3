"""The end of a run: its verdict, its result, its last lines of output, and the final weights of its model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainwright.checkpoint.manifest import name_of
from trainwright.checkpoint.store import read_best
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.weights import load_plain_state_dict, read_weights
from trainwright.engine.loop import Outcome
from trainwright.engine.loss import Loss
from trainwright.engine.metrics import NO_METRICS, MetricSet
from trainwright.report.findings import exit_code
from trainwright.report.verdict import cost
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.json_values import strict
from trainwright.runs.printing import figure
from trainwright.runs.records import Ended, Evaluated, Found, RunVerdict
from trainwright.training.job import Job
from trainwright.training.open_run import HeldFolder, OpenRun, Process, is_saved
from trainwright.training.resume import doubled_length, resume_command


def closing(
    ended: Ended, run: Path, evaluated: Evaluated | None, *, saved: bool, again: str, longer: str, launch: str = ""
) -> list[str]:
    """Return the last lines to print: the verdict, run, reached and next.

    Args:
        ended: The record of the end, with its verdict.
        run: The run folder.
        evaluated: The last evaluation.
        saved: True if the last state is on disk.
        again: The command that continues the run.
        longer: The option that doubles the length of the run, appended to ``again``; "" if there is none.
        launch: The options that start as many ranks again, the last part of the command; "" for one process.
    """
    if ended.ending != "stopped" and saved and longer:
        step = f"{again} {longer}{launch}   # trains it further"
    elif " train " in again:
        step = f"{again}{launch}   # starts again: nothing is saved"
    else:
        step = f"{again}{launch}   # continues from the newest checkpoint"
    parts = [f"step {ended.step:,}"]
    if ended.loss is not None:
        parts.append(f"training loss of the last step {figure(ended.loss)}")
    if evaluated is not None:
        parts.append(f"validation loss {figure(evaluated.loss)}")
        parts += [f"{name} {value:.4g}" for name, value in evaluated.metrics.items()]
    parts += cost(ended)
    return [f"verdict: {ended.verdict}", f"run      {run}", f"reached  {', '.join(parts)}", f"next     {step}"]


@dataclass(frozen=True, repr=False)
class Result:
    """The end of a run and the findings of the doctor.

    Attributes:
        run: The run folder.
        ending: How the run ended: "finished", "stopped", "data_exhausted" or "failed".
        reason: Why the run was stopped, else "".
        step: Optimizer steps taken.
        loss: The last training loss.
        val_loss: The last validation loss.
        skipped: Number of updates that were not applied: non-finite gradients, nothing counted, or a gradient spike.
        exit_code: 1 if the end of the run is not saved, else the exit code of the Stop that ended it (75 for a signal),
            else 3 for a critical finding, else 0.
        metrics: The last validation metrics by name.
        state: The live state, including the average of the weights (``state.ema``).
        findings: The findings of the doctor.
        is_first: True on the rank that wrote the run folder.
        restored: The step whose weights the model has, if the best ones were restored.
        interrupted_by: The name of the signal that stopped the run, such as SIGINT, else "".
        loss_fn: The loss of the run, for ``tw.evaluate(result, data)``.
        metric_set: The metrics of the run, for ``tw.evaluate(result, data)``.
        verdict: The outcome in one word and one sentence; None on a rank that wrote nothing.
        energy_kwh: Energy of the GPUs in kWh; None if they do not count it.
        co2_g: Grams of CO2 of this energy; None if the recipe names no ``grid``.
        usd: Price of the devices for the time of the run in US dollars; None if it is not known.
    """

    run: Path
    ending: str
    reason: str
    step: int
    loss: float | None
    val_loss: float | None
    skipped: int
    exit_code: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    state: TrainState | None = None
    findings: tuple[Found, ...] = ()
    is_first: bool = True
    restored: int | None = None
    interrupted_by: str = ""
    loss_fn: Callable[..., Loss | Tensor] | None = None
    metric_set: MetricSet = NO_METRICS
    verdict: RunVerdict | None = None
    energy_kwh: float | None = None
    usd: float | None = None
    co2_g: float | None = None

    def __repr__(self) -> str:
        """Summarize the result in a few lines."""
        how = self.ending if not self.reason else f"{self.ending} ({self.reason})"
        trained = f", loss {self.loss:.4g}" if self.loss is not None else ""
        skipped = f", {self.skipped} updates skipped" if self.skipped else ""
        lines = [f"{how} at step {self.step:,}{trained}{skipped}"]
        figures = {"loss": self.val_loss, **self.metrics} if self.val_loss is not None else self.metrics
        if figures:
            lines.append("validation: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        if self.restored is not None:
            lines.append(f"the model has the weights of step {self.restored:,}, the best")
        lines += [f"verdict: {self.verdict}"] if self.verdict is not None else []
        lines += [f"{found.severity}: {found.symptom} ({found.code})" for found in self.findings]
        return "\n".join([*lines, f"run folder: {self.run}"])

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        names = ("ending", "step", "loss", "val_loss", "skipped", "energy_kwh", "usd", "co2_g")
        findings = [strict(found) for found in self.findings]
        figures = {name: getattr(self, name) for name in names}
        return {"run": str(self.run), **figures, "verdict": strict(self.verdict), "findings": findings}


def finish(job: Job, place: HeldFolder, run: OpenRun, outcome: Outcome, process: Process) -> Result:
    """Print how the run ended, restore the best weights if requested, and return the result.

    On a rank that wrote nothing, the result has no findings and no verdict.
    """
    stop, reports = outcome.stop, run.reports
    evaluated = run.evaluation.last if run.evaluation else None
    common: dict[str, Any] = {
        "run": place.folder.path,
        "ending": outcome.ending,
        "reason": stop.reason if stop else "",
        "step": outcome.step,
        "loss": float(outcome.last.loss) if outcome.last else None,
        "val_loss": evaluated.loss if evaluated else None,
        "state": job.state,
        "interrupted_by": process.signals.received_name or (stop.reason if stop and stop.by_signal else ""),
        "loss_fn": job.parts.loss,
        "metric_set": job.built.metrics,
    }
    code = stop.exit_code if stop else 0
    if reports is None:
        metrics = dict(evaluated.metrics) if evaluated else {}
        return Result(skipped=job.state.ledger.total, exit_code=code, metrics=metrics, is_first=False, **common)
    findings, ended = reports.findings, reports.logbook.ended
    assert ended is not None
    is_whole = is_saved(reports.newest, outcome.step)
    last = reports.logbook.recorder.last_evaluated
    process.progress.close()
    is_live = job.is_only_in_python
    ranks = job.world.size if os.environ.get("LOCAL_WORLD_SIZE") == str(job.world.size) else 1  # all on this machine
    for line in closing(
        ended,
        place.folder.path,
        last,
        saved=is_whole,
        again=resume_command(place.folder, live=is_live),
        longer="" if is_live else doubled_length(job.loaded.as_written.until),
        launch=f" -- --nproc-per-node {ranks}" if ranks > 1 and not is_live else "",
    ):
        process.progress.say(line)
    return Result(
        skipped=ended.skipped,
        exit_code=(code or exit_code(findings)) if is_whole else 1,
        metrics=dict(last.metrics) if last else {},
        findings=findings,
        verdict=ended.verdict,
        energy_kwh=ended.energy_kwh,
        usd=ended.usd,
        co2_g=ended.co2_g,
        restored=restore_best(job, place.folder, process.progress.say),
        **common,
    )


def restore_best(job: Job, folder: RunFolder, say: Callable[[str], None]) -> int | None:
    """Load the weights of the best checkpoint into the model, if the recipe requests it, and return its step."""
    if not job.recipe.checkpoint.restore_best:
        return None
    best = read_best(folder.checkpoints, identity_of(folder))
    if best is None:
        say("no best weights to restore: no evaluation gave a finite value")
        return None
    load_plain_state_dict(job.state.model, read_weights(folder.checkpoints / name_of(best.step)))
    say(f"the model has the weights of step {best.step:,}, the best: {best.metric} {best.value:.6g}")
    return best.step
