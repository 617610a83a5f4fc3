"""What a person sees of a run: a live line on a terminal or in a notebook, a plain line now and then in a file."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import psutil
import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.step import StepResult
from trainwright.observe.notebook import NotebookCell
from trainwright.runlog.printing import printable
from trainwright.runlog.records import Found
from trainwright.runlog.secrets import masked
from trainwright.state.train_state import TrainState

LIVE_EVERY_S = 0.25
PLAIN_EVERY_S = 10.0


class Progress:
    """An Observer. Reads the loss only when it shows it: on a GPU one host sync each quarter of a second.

    ``marks`` are reference losses by name (``{"bigram": 2.46}``): the line says which are passed. ``findings`` gives
    those so far (None: nobody looks), ``peak_samples_s`` is the pace at the peak rate of the devices (None: not known).
    """

    def __init__(
        self,
        console: Console,
        *,
        marks: Mapping[str, float] | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock, self._quiet = console, clock, quiet
        self.marks: Mapping[str, float] = marks or {}
        self.findings: Callable[[], Sequence[Found]] | None = None
        self.peak_samples_s: float | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True) if moves_cursor(console) else None
        self._cell = NotebookCell() if console.is_jupyter and not quiet else None
        self._every_s = LIVE_EVERY_S if self._live or self._cell else PLAIN_EVERY_S
        self._shown_s = clock()
        self._samples: int | None = None
        self._tokens = 0
        self._loss: float | None = None
        self._val: float | None = None
        self._wait_s = self._work_s = 0.0
        if self._live and not quiet:
            self._live.start()

    def say(self, text: str) -> None:
        """A line of its own, above the live one, without secrets."""
        self.print(masked(text))

    def print(self, text: str) -> None:
        """A line as it is, such as an address with its token."""
        if self._quiet:
            return
        try:
            self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
        except (OSError, SystemExit):  # whoever read the other end of the pipe is gone: no reason to stop training
            self._quiet = True

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        """Shows the validation loss from now on."""
        self._val = seen.loss
        metrics = "".join(f"   {name} {value:.4g}" for name, value in seen.metrics.items())
        part = f" on {seen.batches} batch{'es' * (seen.batches > 1)}" if seen.batches else ""
        self.say(f"step {step:>6}   validation loss {seen.loss:.4f}{metrics}{part}{self._passed(seen.loss)}")

    def observe(self, result: StepResult, state: TrainState) -> None:
        for bad in result.batch.bad:
            self.say(f"step {result.step:>6}   sample {bad.id} cannot be read and is left out from now on: {bad.what}")
        for each in result.oom_reports:
            self.say(f"step {result.step:>6}   {each}")
        self._wait_s += result.wait_s
        self._work_s += result.step_s
        if self._samples is None:
            self._samples, self._tokens = state.num_samples - result.batch.size, state.num_tokens
        now_s = self._clock()
        if self._quiet or now_s - self._shown_s < self._every_s:
            return
        line = self._line(result, state, now_s - self._shown_s)
        self._shown_s, self._wait_s, self._work_s = now_s, 0.0, 0.0
        self._samples, self._tokens = state.num_samples, state.num_tokens
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._cell:
            self._cell.update(line, result.step, float(result.loss))
        else:
            self.say(line)

    def _line(self, result: StepResult, state: TrainState, since_s: float) -> str:
        loss = float(result.loss)
        self._loss = loss if self._loss is None or loss != loss else 0.7 * self._loss + 0.3 * loss
        rate = (state.num_samples - (self._samples or 0)) / max(since_s, 1e-9)
        left_s = state.elapsed_s / state.fraction * (1 - state.fraction) if state.fraction > 0 else float("nan")
        parts = [
            f"{state.fraction:4.0%}",
            f"step {result.step}",
            f"loss {self._loss:.3f}",
            *([f"val {self._val:.3f}"] if self._val is not None else []),
            *([health(self.findings())] if self.findings is not None else []),
            f"{rate:,.0f} samples/s",
            *([f"{tokens / max(since_s, 1e-9):,.0f} tokens/s"] if (tokens := state.num_tokens - self._tokens) else []),
            *([f"MFU {rate / self.peak_samples_s:.1%}"] if self.peak_samples_s else []),
            f"ETA {_duration(left_s)}",
            f"{in_use_bytes(result.grad_norm.device) / 2**30:.2f} GiB",
        ]
        wait = self._wait_s / self._work_s if self._work_s else 0.0
        if wait > 0.1:
            parts.append(f"waits for data {wait:.0%}")
        if state.ledger.entries:
            parts.append(f"{len(state.ledger.entries)} steps skipped")
        return "  ".join(parts) + self._passed(self._loss)

    def _passed(self, loss: float) -> str:
        """`   uniform 4.63 > unigram 3.25 > [2.91] > bigram 2.46`"""
        if not self.marks:
            return ""
        marks = sorted(self.marks.items(), key=lambda mark: -mark[1])
        above = [f"{name} {value:.2f}" for name, value in marks if value >= loss]
        below = [f"{name} {value:.2f}" for name, value in marks if value < loss]
        return "   " + " > ".join([*above, f"[{loss:.2f}]", *below])

    def close(self) -> None:
        if self._live:
            self._live.stop()


def health(findings: Sequence[Found]) -> str:
    """`healthy`, or `1 critical, 2 warnings`."""
    counts = Counter(each.severity for each in findings)
    critical, warnings = counts["critical"], counts["warning"]
    bad = [f"{critical} critical"] * bool(critical) + [f"{warnings} warning{'s' * (warnings > 1)}"] * bool(warnings)
    return ", ".join(bad) or "healthy"


def moves_cursor(console: Console) -> bool:
    """Whether a line can be written anew. ``FORCE_COLOR`` asks for colours only: a file would fill up with lines."""
    is_forced = bool(os.environ.get("FORCE_COLOR"))
    return console.is_terminal and not console.is_dumb_terminal and (not is_forced or console.file.isatty())


def in_use_bytes(device: torch.device) -> int:
    """What tensors hold of a GPU, or this process of the host."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else int(psutil.Process().memory_info().rss)


def _duration(seconds: float) -> str:
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
