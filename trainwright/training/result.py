"""The result of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loss import Loss
from trainwright.engine.metrics import NO_METRICS, MetricSet
from trainwright.runs.json_values import strict
from trainwright.runs.records import Found, RunVerdict
from trainwright.training.follow import Followed


@dataclass(frozen=True, repr=False)
class Result:
    """The end of a run and the findings of the doctor.

    Attributes:
        run: The run folder.
        ending: How the run ended: "finished", "stopped", "data_exhausted" or "failed".
        reason: Why it was stopped, else "".
        step: Optimizer steps taken.
        loss: The last training loss.
        val_loss: The last validation loss.
        skipped: Updates that were skipped because of non-finite gradients.
        exit_code: 1 if the end of the run is not saved, 75 if it was stopped by request and is saved, 3 for a critical
            finding, else 0.
        metrics: The last validation metrics by name.
        state: The live state, including the average of the weights (``state.ema``).
        findings: The findings of the doctor.
        is_first: True on the rank that wrote the run folder.
        restored: The step whose weights the model has, if the best ones were restored.
        interrupted_by: The name of the signal that stopped the run, such as SIGINT, else "".
        loss_fn: The loss of the run, for ``tw.evaluate(result, data)``.
        metric_set: The metrics of the run, for ``tw.evaluate(result, data)``.
        verdict: The outcome in one word and one sentence; None on a rank that wrote nothing.
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

    @classmethod
    def of_follower(cls, seen: Followed) -> Result:
        """Return the result on a rank that wrote nothing. Only the first rank reports findings."""
        outcome, evaluated = seen.outcome, seen.evaluation.last if seen.evaluation else None
        return cls(
            seen.folder.path,
            outcome.ending,
            outcome.stop.reason if outcome.stop else "",
            outcome.step,
            float(outcome.last.loss) if outcome.last else None,
            evaluated.loss if evaluated else None,
            seen.job.state.ledger.total,
            outcome.stop.exit_code if outcome.stop else 0,
            dict(evaluated.metrics) if evaluated else {},
            seen.job.state,
            is_first=False,
            interrupted_by=outcome.stop.reason if outcome.stop and outcome.stop.by_signal else "",
            loss_fn=seen.job.parts.loss,
            metric_set=seen.job.built.metrics,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        names = ("ending", "step", "loss", "val_loss", "skipped")
        findings = [strict(found) for found in self.findings]
        figures = {name: getattr(self, name) for name in names}
        return {"run": str(self.run), **figures, "verdict": strict(self.verdict), "findings": findings}
