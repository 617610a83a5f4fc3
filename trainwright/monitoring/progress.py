"""Shows the progress of a run: a live line on a terminal or in a notebook, plain lines at intervals in a file.

Also measures the times of steps, evaluations, examinations and saves, and corrects the predicted end of the run.
"""

from __future__ import annotations

import html
import importlib
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil
import torch
from rich.cells import cell_len
from torch import Tensor

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.step import StepResult
from trainwright.monitoring.terminal import Console, Live, Text
from trainwright.runs.language import translated
from trainwright.runs.printing import figure, printable
from trainwright.runs.records import Found
from trainwright.runs.secrets import masked

LIVE_EVERY_S = 0.25
PLAIN_EVERY_S = 10.0
MIN_STEPS_LIVE = 16
"""Minimum number of steps whose losses a live line averages, because single losses vary too much to read."""
MAX_PENDING = 64
"""Number of losses that are kept on their device before they are summed there."""
MIN_WAIT_FRACTION = 0.1
GAP = "  "


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    """The values of a progress line. ``parts`` are ordered by importance: a narrow terminal shows the first ones.

    Args:
        fraction: The completed fraction of the run, from 0 to 1.
        loss: The mean over the latest steps, see ``LossMean``.
        samples_s: Samples per second.
        memory_of: The owner of this memory: the process, or tensors on the GPU.
        epoch: The number of the epoch, from 1; None: the data have no epochs.
        val: The last validation loss.
        left_s: Seconds until the end of the run; None: not known yet.
        mfu: Model FLOPs utilization.
        wait: The fraction of the step time that was spent waiting for data.
    """

    fraction: float
    step: int
    loss: float
    lr: float
    memory_bytes: int
    samples_s: float
    memory_of: str = "process"
    epoch: int | None = None
    epochs: float | None = None
    val: float | None = None
    findings: str = ""
    skipped: int = 0
    left_s: float | None = None
    tokens_s: float | None = None
    mfu: float | None = None
    wait: float = 0.0
    references: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        parts = [f"{self.fraction:4.0%}"]
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}{f'/{self.epochs:.4g}' if self.epochs else ''}")
        parts += [f"step {self.step}", f"loss {figure(self.loss)}"]
        if self.val is not None:
            parts.append(f"val {figure(self.val)}")
        parts.append(f"lr {self.lr:.3g}")
        if self.findings:
            parts.append(self.findings)
        if self.skipped:
            parts.append(f"{self.skipped} step{'s' * (self.skipped > 1)} skipped")
        parts += [f"ETA {duration(self.left_s)}", f"{self.memory_of} {self.memory_bytes / 2**30:.2f} GiB"]
        if self.wait > MIN_WAIT_FRACTION:
            parts.append(f"waits for data {self.wait:.0%}")
        parts.append(f"{self.samples_s:,.0f} samples/s")
        if self.tokens_s:
            parts.append(f"{self.tokens_s:,.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.references:
            parts.append(among_references(self.loss, self.references))
        return parts

    def text(self, width: int | None = None) -> str:
        """Return the line, of at most ``width`` cells. The last parts that do not fit are left out."""
        parts = [*map(translated, self.parts)]
        while width is not None and len(parts) > 1 and cell_len(GAP.join(parts)) > width:
            parts.pop()
        return GAP.join(parts)


class LossMean:
    """The mean of the losses of steps. Losses are read only when the mean is taken, with one host sync.

    The mean is over the steps since it was last taken, and over at least the newest ``least`` steps. Non-finite losses
    are left out if there are finite ones.
    """

    def __init__(self, least: int = 1) -> None:
        self._newest: deque[Tensor] = deque(maxlen=least)
        self._pending: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._steps = 0

    def add(self, loss: Tensor) -> None:
        self._newest.append(loss)
        self._pending.append(loss)
        self._steps += 1
        if len(self._pending) == MAX_PENDING:
            self._sums.append(_summed(self._pending))
            self._pending = []

    def take(self) -> float:
        """Return the mean, and start a new one."""
        if self._steps < len(self._newest):
            sums = [_summed([*self._newest])]
        else:
            sums = self._sums + ([_summed(self._pending)] if self._pending else [])
        self._pending = []
        self._sums = []
        self._steps = 0
        total, number = torch.stack(sums).sum(0).tolist()
        return total / number if number else math.nan


def _summed(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum and the number of the finite losses, on their device."""
    values = torch.stack([loss.detach() for loss in losses]).float()
    finite = values.isfinite()
    return torch.stack([values.where(finite, 0.0).sum(), finite.sum()])


class Progress:
    """An observer that reads losses only when it shows a line: on a GPU one host sync a line.

    Attributes:
        references: Reference losses by name (``{"bigram": 2.46}``). The line shows which of them the loss is below.
        findings: Returns the findings so far.
        peak_samples_s: Samples per second at the peak rate of the devices.
        left_s: Estimates the seconds until the end of the run.
        epochs: The planned number of epochs.
    """

    def __init__(self, console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._quiet = quiet
        self.references: Mapping[str, float] = {}
        self.findings: Callable[[], Sequence[Found]] = tuple
        self.peak_samples_s: float | None = None
        self.left_s: Callable[[TrainState], float | None] = _at_this_pace
        self.epochs: float | None = None
        self.has_epochs = False
        self._live = Live(console=console, auto_refresh=False, transient=True) if moves_cursor(console) else None
        self._cell = NotebookCell() if console.is_jupyter and not quiet else None
        is_renewed = self._live is not None or self._cell is not None
        self._every_s = LIVE_EVERY_S if is_renewed else PLAIN_EVERY_S
        self._losses = LossMean(MIN_STEPS_LIVE if is_renewed else 1)
        self._shown_s = clock()
        self._samples: int | None = None
        self._tokens = 0
        self._val: float | None = None
        self._wait_s = 0.0
        self._work_s = 0.0
        if self._live and not quiet:
            self._live.start()

    def say(self, text: str) -> None:
        """Print a separate line above the live one, with secrets masked."""
        self.print(masked(text))

    def print(self, text: str) -> None:
        """Print a line without masking secrets, such as an address with its token."""
        if self._quiet:
            return
        with self._until_unreadable():
            self._console.print(printable(translated(text)), highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def _until_unreadable(self) -> Iterator[None]:
        """Print nothing more if the terminal or the reader of the pipe is gone, which must not stop the training."""
        try:
            yield
        except (OSError, SystemExit):
            self._quiet = True

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        self._val = seen.loss
        metrics = "".join(f"   {name} {value:.4g}" for name, value in seen.metrics.items())
        part = f" on {seen.batches} batch{'es' * (seen.batches > 1)}" if seen.batches else ""
        passed = f"   {among_references(seen.loss, self.references)}" if self.references else ""
        if seen.bad_samples:
            passed = f"   NaN or infinity in the validation samples {', '.join(map(str, seen.bad_samples))}"
        self.say(f"step {step:>6}   validation loss {figure(seen.loss)}{metrics}{part}{passed}")

    def observe(self, result: StepResult, state: TrainState) -> None:
        for bad in result.batch.bad:
            self.say(f"step {result.step:>6}   sample {bad.id} cannot be read and is left out from now on: {bad.what}")
        for each in result.oom_reports:
            self.say(f"step {result.step:>6}   {each}")
        if self._quiet:
            return
        self._losses.add(result.loss)
        self._wait_s += result.wait_s
        self._work_s += result.step_s
        if self._samples is None:
            self._samples, self._tokens = state.num_samples - result.batch.size, state.num_tokens
            self._shown_s = self._clock() - result.step_s  # leaves out plan and dry run
        now_s = self._clock()
        if now_s - self._shown_s < self._every_s:
            return
        line = self._line(result, state, now_s - self._shown_s)
        self._shown_s = now_s
        self._wait_s = 0.0
        self._work_s = 0.0
        self._samples, self._tokens = state.num_samples, state.num_tokens
        if self._live:
            text = Text(line.text(self._console.width), no_wrap=True, overflow="ellipsis")
            with self._until_unreadable():
                self._live.update(text, refresh=True)
        elif self._cell:
            self._cell.update(line.text(), result.step, line.loss)
        else:
            self.say(line.text())

    def _line(self, result: StepResult, state: TrainState, since_s: float) -> ProgressLine:
        since_s = max(since_s, 1e-9)
        samples_s = (state.num_samples - (self._samples or 0)) / since_s
        return ProgressLine(
            fraction=state.fraction,
            step=result.step,
            loss=self._losses.take(),
            lr=result.lr,
            memory_bytes=in_use_bytes(result.grad_norm.device),
            memory_of="GPU" if result.grad_norm.device.type == "cuda" else "process",
            samples_s=samples_s,
            epoch=state.data.epoch + 1 if self.has_epochs or state.data.epoch else None,
            epochs=self.epochs,
            val=self._val,
            findings=counts_in_words(self.findings()),
            skipped=len(state.ledger.entries),
            left_s=self.left_s(state),
            tokens_s=(state.num_tokens - self._tokens) / since_s,
            mfu=samples_s / self.peak_samples_s if self.peak_samples_s else None,
            wait=self._wait_s / self._work_s if self._work_s else 0.0,
            references=self.references,
        )

    def close(self) -> None:
        if self._live:
            with self._until_unreadable():
                self._live.stop()


def _at_this_pace(state: TrainState) -> float | None:
    """Return the remaining seconds, extrapolated from the training time so far."""
    return state.elapsed_s / state.fraction * (1 - state.fraction) if state.fraction > 0 else None


def among_references(loss: float, references: Mapping[str, float]) -> str:
    """Return the loss among references: `uniform 4.63 > unigram 3.25 > [2.91] > bigram 2.46`."""
    ordered = sorted(references.items(), key=lambda reference: -reference[1])
    above = [f"{name} {value:.2f}" for name, value in ordered if value >= loss]
    below = [f"{name} {value:.2f}" for name, value in ordered if value < loss]
    return " > ".join([*above, f"[{loss:.2f}]", *below])


def counts_in_words(findings: Sequence[Found]) -> str:
    """Return counts such as `1 critical, 2 warnings`; "" without findings."""
    counts = Counter(each.severity for each in findings)
    critical, warnings = counts["critical"], counts["warning"]
    bad = [f"{critical} critical"] * bool(critical) + [f"{warnings} warning{'s' * (warnings > 1)}"] * bool(warnings)
    return ", ".join(bad)


def moves_cursor(console: Console) -> bool:
    """Return True if a line can be overwritten. ``FORCE_COLOR`` enables colours only: files cannot overwrite."""
    is_forced = bool(os.environ.get("FORCE_COLOR"))
    return console.is_terminal and not console.is_dumb_terminal and (not is_forced or console.file.isatty())


def in_use_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU, or those of this process on the host."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else int(psutil.Process().memory_info().rss)


def duration(seconds: float | None) -> str:
    """Return text such as `1h02m`, `2m10s` and `8s`; `?` if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


WIDTH = 480
HEIGHT = 90
MAX_POINTS = 240
"""Maximum points of the curve. If exceeded, every second point is removed and new ones are added half as often."""


class NotebookCell:
    """The output of a running notebook cell. Needs IPython."""

    def __init__(self) -> None:
        display: Any = importlib.import_module("IPython.display")
        self._html = display.HTML
        self._handle = display.display(self._html(""), display_id=True)
        self._points: list[tuple[int, float]] = []
        self._apart = 1

    def update(self, line: str, step: int, loss: float) -> None:
        """Show ``line`` below the curve. Adds this loss to the curve if enough steps have passed."""
        if not self._points or step - self._points[-1][0] >= self._apart:
            self._points.append((step, loss))
        if len(self._points) > MAX_POINTS:
            self._points = self._points[::2]
            self._apart = self._points[1][0] - self._points[0][0]
        self._handle.update(self._html(f"{curve(self._points)}<pre>{html.escape(line)}</pre>"))


def curve(points: list[tuple[int, float]]) -> str:
    """Return an SVG of values over steps. A non-finite value is a gap. Empty for fewer than two values."""
    finite = [value for _, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    first, last = points[0][0], points[-1][0]
    parts: list[list[str]] = [[]]
    for step, value in points:
        if not math.isfinite(value):
            parts.append([])
            continue
        x = WIDTH * (step - first) / max(1, last - first)
        y = HEIGHT * (1 - (value - low) / ((high - low) or 1.0))
        parts[-1].append(f"{x:.1f},{y:.1f}")
    lines = "".join(
        f'<polyline points="{" ".join(part)}" fill="none" stroke="currentColor"/>' for part in parts if part
    )
    label = f"loss from step {first} to {last}: {low:.4g} to {high:.4g}"
    return (
        f'<svg viewBox="-2 -2 {WIDTH + 4} {HEIGHT + 4}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f"<title>{label}</title>{lines}</svg>"
    )


@dataclass(frozen=True)
class Measured:
    """Means over at least the newer half of the steps so far, in seconds per step.

    ``step_s`` includes the wait for the batch, ``examination_s`` is the doctor's part, and ``beside_s`` is all else:
    log, telemetry, saves. ``evaluation_s`` is the last evaluation, None before the first. ``examined_s`` is the total
    of the doctor.
    """

    step_s: float
    evaluation_s: float | None
    examination_s: float
    examined_s: float
    beside_s: float


class _Sums(NamedTuple):
    steps: int = 0
    steps_s: float = 0.0
    examined_s: float = 0.0
    beside_s: float = 0.0


class TimeSpent:
    """An observer that adds up the components of the time between two steps.

    ``examined_s`` returns the total seconds of the doctor. ``measured`` leaves out early steps, which are slower and
    examined more often: it covers at least the newer half of the steps, from a power of two on.
    """

    def __init__(self, examined_s: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._examined_s, self._clock = examined_s, clock
        self._sums = self._mark = self._next_mark = _Sums()
        self._last_s: float | None = None
        self._evaluation_s: float | None = None

    def observe(self, result: StepResult, _state: TrainState) -> None:
        now_s, examined_s = self._clock(), self._examined_s()
        evaluated_s = 0.0
        if result.evaluation is not None:
            self._evaluation_s = evaluated_s = result.evaluation.seconds
        before, beside_s = self._sums, 0.0
        if self._last_s is not None:
            between_s = now_s - self._last_s - result.step_s - evaluated_s
            beside_s = max(0.0, between_s - (examined_s - before.examined_s))
        self._last_s = now_s
        steps = before.steps + 1
        self._sums = _Sums(steps, before.steps_s + result.step_s, examined_s, before.beside_s + beside_s)
        if steps & (steps - 1) == 0:  # a power of two
            self._mark, self._next_mark = self._next_mark, self._sums

    def measured(self) -> Measured | None:
        """Return the measurements; None before the second step."""
        now, then = self._sums, self._mark
        steps = now.steps - then.steps
        if now.steps < 2:
            return None
        return Measured(
            (now.steps_s - then.steps_s) / steps,
            self._evaluation_s,
            (now.examined_s - then.examined_s) / steps,
            now.examined_s,
            (now.beside_s - then.beside_s) / steps,
        )

    def close(self) -> None: ...


STEPS_BEFORE_PREDICTION = 50
"""Steps of this process before the prediction. The first ten are slower and do not count."""
MIN_SECONDS_LEFT = 2.0
"""Remaining seconds below which nothing is printed."""

SecondsLeft = Callable[[TrainState], float | None]
"""Returns the remaining wall-clock seconds of a run; None if unknown."""


class EndTime:
    """An observer that prints the predicted end of the run, once.

    ``line`` makes the text from the seconds of a step, the remaining seconds and the current Unix time.
    """

    def __init__(
        self,
        seconds_left: SecondsLeft,
        line: Callable[[float, float, float], str],
        say: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._left_over = seconds_left
        self._line = line
        self._say = say
        self._wall_clock = wall_clock
        self._count, self._steps_s = 0, 0.0

    def observe(self, result: StepResult, state: TrainState) -> None:
        self._count += 1
        if self._count > STEPS_BEFORE_PREDICTION:
            return
        if self._count > STEPS_BEFORE_PREDICTION // 5:
            self._steps_s += result.step_s
        if self._count == STEPS_BEFORE_PREDICTION:
            step_s = self._steps_s / (STEPS_BEFORE_PREDICTION - STEPS_BEFORE_PREDICTION // 5)
            left_s = self._left_over(state)
            if left_s is not None and left_s > MIN_SECONDS_LEFT:
                self._say(f"step {result.step:>6}   {self._line(step_s, left_s, self._wall_clock())}")

    def close(self) -> None: ...
