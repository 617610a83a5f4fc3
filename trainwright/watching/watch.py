"""``tw.watch``: the context manager around a user's loop."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.checkpoint.weights import require_python
from trainwright.doctor.check import Check
from trainwright.doctor.discovery import DEFAULT, choose_checks
from trainwright.engine.spikes import OnSpike, require_policy
from trainwright.errors import StorageError, UsageError, require_choice, text_of
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.media import MediaWriter
from trainwright.monitoring.module_tree import model_facts
from trainwright.monitoring.terminal import Console
from trainwright.recorder.comparisons import EvaluationSites
from trainwright.recorder.foreign import ForeignOptimizer
from trainwright.recorder.optimizers import optimizers_in, unwrapped
from trainwright.recorder.probes import LoopObjects, Probe
from trainwright.recorder.ring import KEEP, enough_bytes
from trainwright.recorder.veto import OnNonfinite
from trainwright.report.findings import lines_of
from trainwright.report.pages.report import NAME as REPORT_NAME
from trainwright.report.pages.report import leave_report
from trainwright.report.verdict import VerdictFacts, evaluations_in, judge, losses_in
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.language import translated
from trainwright.runs.lock import RunLock
from trainwright.runs.media import Loggable
from trainwright.runs.printing import printable
from trainwright.runs.reader import read
from trainwright.runs.records import Found, Record
from trainwright.runs.secrets import masked
from trainwright.runs.writer import LogWriter
from trainwright.version import __version__
from trainwright.watching.budget import Examine
from trainwright.watching.caller_source import CallerSource
from trainwright.watching.experiments import UserCheck
from trainwright.watching.forwarding import ForwardingProbe
from trainwright.watching.layers import layer_probes
from trainwright.watching.reference import ReferenceProbe
from trainwright.watching.session import WatchOptions, WatchSession

if TYPE_CHECKING:
    from trainwright.watching.profiled import ProfileProbe


class Watch:
    """A context manager around a training loop, made by ``tw.watch``."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        objects: Callable[[], LoopObjects],
        options: Callable[[], WatchOptions],
        *,
        folder: RunFolder | None,
        console: Console | None,
        forwarding: ForwardingProbe,
        profile: ProfileProbe | None = None,
    ) -> None:
        self.folder, self._console, self._profile, self._forwarding = folder, console, profile, forwarding
        self._config = {"model": type(roots[0]).__name__, "optimizer": type(optimizers[0]).__name__}
        self._open = ExitStack()
        self._log: Journal | None = None
        self._media: MediaWriter | None = None
        self._source = CallerSource()
        self._roots, self._optimizers, self._objects, self._options = roots, optimizers, objects, options
        self._has_begun = self._listens_to_children = False
        if not self._is_lazy():
            self.session  # noqa: B018  built now, so that its errors are raised by tw.watch

    @cached_property
    def session(self) -> WatchSession:
        """The session that records and examines the loop."""
        return WatchSession(
            self._roots,
            self._optimizers,
            replace(
                self._objects(),
                modules=self._source.modules,
                values=self._source.values,
                frames=self._source.frames,
                sites=EvaluationSites(self._source.code),
            ),
            self._options(),
            write=self._write,
            say=self._say,
        )

    def _is_lazy(self) -> bool:
        """Returns True if parameters have no shape before the first forward pass (torch.nn.LazyLinear)."""
        return any(is_lazy(p) for root in self._roots for p in root.parameters())

    def _begin(self, *step: object) -> None:
        """Begins the session: on entry, or with lazy parameters as a hook after the first ``step`` of an optimizer."""
        if not self._has_begun and not self._is_lazy():
            self._has_begun = True
            self.session.begin()
            for line in self.session.limits:
                self._say(line)
            if step:
                self.session.recording.current.blind = "the parameters of the model were made in this step"
            if self._listens_to_children:
                self.session.listen_to_children()

    def listen_to_children(self) -> None:
        """Also records calls of the children of the models. Use it if the loop calls these and never the model."""
        self._listens_to_children = True
        if self._has_begun:
            self.session.listen_to_children()

    def __enter__(self) -> Self:
        self._source.begin(sys._getframe(1))
        if self.folder is not None:
            self._open.enter_context(self._forwarding.opened(self.folder, self._config, self._say))
            with suppress(StorageError):  # without a lock, a running loop cannot be distinguished from a killed one
                self._open.callback(RunLock.acquire(self.folder.path).release, True)
            self._log = self._open.enter_context(closing(Journal(LogWriter(self.folder.log), self._say)))
            self._media = MediaWriter(self.folder.path, self._write, self._forwarding.sinks, self._say)
        self._write(records.Started(time_s=time.time(), step=0, version=__version__, pid=os.getpid()))
        self._begin()
        for optimizer in () if self._has_begun else self._optimizers:
            self._open.callback(optimizer.register_step_post_hook(self._begin).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.callback(self._source.forget)
        with self._open:
            if not self._has_begun:
                self._say("watch: nothing was watched: the model has lazy parameters, and no update was made")
                return
            if self.session.is_forked:
                self.session.leave()
                return
            self.session.end(error)
            ended = self._ended(error)
            self._write(ended)
            for line in self._profile.leave(self.folder) if self._profile else ():
                self._say(line)
            if self.folder is not None:
                leave_report(self.folder, self._say)
            for line in self._closing_lines(ended):
                self._say(line)

    def _closing_lines(self, ended: records.Ended) -> Iterator[str]:
        """Yields the closing lines: findings, examinations, verdict, and where to read more."""
        yield from lines_of(self.findings(), self.folder.path if self.folder else None)
        yield from self.session.findings_log.examination().lines(self.folder.path if self.folder else None)
        if ended.verdict is not None:
            yield f"verdict: {ended.verdict}"
        if self.folder is not None:
            yield f"run      {self.folder.path}"
            yield f"page     trainwright serve {self.folder.path}   # or open {self.folder.path / REPORT_NAME}"

    def _ended(self, error: BaseException | None) -> records.Ended:
        losses, evaluations = losses_in(self.records), evaluations_in(self.records)
        is_interrupt = isinstance(error, KeyboardInterrupt)
        ending = "finished" if error is None else "stopped" if is_interrupt else "failed"
        reason = "" if error is None else "Ctrl-C" if is_interrupt else text_of(error)
        facts = VerdictFacts(
            state=ending,
            reason=reason,
            step=self.step,
            losses=losses,
            evaluations=evaluations,
            skipped=self.session.num_vetoed,
            findings=self.findings(),
        )
        return records.Ended(
            time_s=time.time(),
            ending=ending,
            reason=reason,
            step=self.step,
            loss=losses[-1][1] if losses else None,
            val_loss=evaluations[-1].loss if evaluations else None,
            skipped=self.session.num_vetoed,
            seconds=self.session.wall_s,
            verdict=self._verdict_on(facts),
        )

    def _verdict_on(self, facts: VerdictFacts) -> records.RunVerdict | None:
        """Returns the verdict; None if it cannot be computed. That must not end the loop or hide its exception."""
        try:
            return judge(facts)
        except Exception as failure:
            self._say(f"no verdict: {type(failure).__name__}: {text_of(failure)[:200]}")
            return None

    def log(self, step: int | None = None, **figures: float | Tensor | Loggable) -> None:
        """Records metrics, images, texts and histograms of the loop and shows them on the page.

        ``watch.log(val_loss=loss, samples=tw.Image(images), answer=text, logits=tw.Histogram(logits))``. Without a run
        folder, images, texts and histograms are not kept.

        Reading a tensor on a GPU waits for the device.

        Args:
            step: Number of optimizer steps. Default: the steps observed so far.
            **figures: Numbers, tensors of one element, ``tw.Image``, ``tw.Histogram`` or strings.

        Raises:
            UsageError: A value is none of these.
        """
        shown = {name: value for name, value in figures.items() if isinstance(value, Loggable)}
        numbers = {name: _figure(name, value) for name, value in figures.items() if name not in shown}
        at = self.step if step is None else step
        if self._has_begun and shown and self._media is not None:
            self._media.write(at, shown)
        if self._has_begun and numbers:
            self.session.findings_log.remember(records.Logged(time_s=time.time(), step=at, figures=numbers))

    @property
    def step(self) -> int:
        """Number of optimizer steps observed so far."""
        return self.session.step if self._has_begun else 0

    @property
    def records(self) -> list[Record]:
        """The records in memory. In a long run, not every step has a record."""
        return self.session.findings_log.records if self._has_begun else []

    @property
    def held_bytes(self) -> int:
        """Bytes that the flight recorder holds."""
        return self.session.held_bytes if self._has_begun else 0

    def findings(self) -> list[Found]:
        """Returns the findings so far, root causes first."""
        return self.session.findings() if self._has_begun else []

    def _write(self, record: Record) -> None:
        if self._log is not None:
            self._log.write(record)
            self._forwarding.record(record)

    def _say(self, line: str) -> None:
        if self._console is not None:
            with suppress(
                OSError, ValueError
            ):  # stderr was closed, which must neither end the loop nor hide its exception
                text = printable(translated(masked(line)))
                self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def watch(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    loader: object = None,
    loss: object = None,
    scaler: object = None,
    scheduler: object = None,
    accumulation: int | None = None,
    out: str | Path | None = "runs/watch",
    on_nonfinite: OnNonfinite = "skip",
    on_spike: OnSpike = "warn",
    skip: str | Path | Iterable[Iterable[int]] = (),
    keep: int = KEEP,
    memory_bytes: int | None = None,
    patience_s: float = 60.0,
    checks: str | UserCheck | Sequence[str | UserCheck] = DEFAULT,
    examine: Examine = "budget",
    check: bool = False,
    like: str | Path | None = None,
    profile: bool | int = False,
    layers: bool = True,
    sinks: Sequence[str] = (),
    alerts: Mapping[str, object] | None = None,
    quiet: bool = False,
) -> Watch:
    """Watch your training loop: put ``with tw.watch(model, optimizer, loader=loader):`` around it.

    By default, training has the same bits with and without it, except that a non-finite update is skipped.

    Args:
        model: The trained module, or a sequence of modules (a GAN).
        optimizer: Its optimizer, or a sequence of optimizers.
        loader: A DataLoader, or a sequence of DataLoaders. Other loaders are recorded as well.
        loss: The loss, if it is a module with parameters.
        scaler: Not needed: the calls of every GradScaler are recorded.
        scheduler: A learning rate scheduler, or a sequence of schedulers.
        accumulation: Number of micro-batches per step, if you accumulate gradients.
        out: Run folder; a number is added if it exists. None writes nothing.
        on_nonfinite: Treatment of a non-finite update: ``"skip"`` skips it, ``"stop"`` ends the loop with an exception,
            ``"observe"`` applies it.
        on_spike: Treatment of a gradient norm of 8 times its median: ``"warn"`` reports it, ``"skip"`` skips the
            update, ``"rollback"`` also restores the last snapshot. A function takes a ``Spike`` (step, grad_norm,
            usual, initial) and returns one of these words.
        skip: Updates to skip: the folder of an earlier watch of this training, whose skipped updates are skipped
            again, or the sample ids of each such step.
        keep: Number of steps that the flight recorder holds.
        memory_bytes: Maximum bytes that the flight recorder holds. Default: three copies of the weights with two
            moments each, at least 256 MiB, and at most a quarter of the free memory of the device.
        patience_s: With several processes, one without progress for this time (in seconds) is reported with its
            current line.
        checks: The checks to make: ``"default"``, or a list of topics, codes (``trainwright checks`` lists them)
            and your functions: ``["default", my_check]``. A function is called at every examination with a
            ``ReplaySession`` of the step, and returns what is wrong with it, or None.
        examine: Extent of the examinations. ``"budget"``: replays take at most 3 % of the training time so far, and
            5 % by its end, or 0.2 s if that is more. Reading the records of the first steps, and what a check requests,
            take up to about a second more. The watch reports what it had no time for. ``"all"``: everything is examined
            at steps 1, 2, 3, 4, 6, 8, 12, ..., 48 without limits of time and memory. ``"listen"``: no step is replayed.
        check: Examine the first step in full, without a time limit, and print the result before the second step
            (docs/how-to/watch-your-loop.md). ``tw.check`` examines data and loss as objects, and needs no loop.
        like: Folder of a healthy run of the same or a similar program. Differences become findings with both values:
            order of calls, modes, shapes, weights that change, losses (docs/concepts/doctor.md).
        profile: Report at the end what bounds a step, and write profile.json and a trace. True measures some steps
            after step 50, a number measures some steps after the step with that number.
        layers: Record statistics by layer from time to time, in at most 0.5 % of the time
            (docs/how-to/layer-statistics.md). Not supported for sharded weights.
        sinks: Trackers that get the metrics, by name: ``["tensorboard", "csv"]`` (docs/how-to/trackers.md).
        alerts: Receivers of alerts, as in ``alerts`` of a recipe: ``{"command": ["./notify.sh"]}``
            (docs/how-to/alerts.md).
        quiet: Print nothing.

    Returns:
        A context manager that records and examines the steps made inside it.

    Raises:
        UsageError: An argument is invalid, or the objects cannot be watched.

    Example:
        >>> with tw.watch(model, optimizer, loader=loader, check=True):
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         F.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
    """
    require_choice("on_nonfinite", on_nonfinite, ("skip", "stop", "observe"))
    require_policy("on_spike", on_spike)
    require_choice("examine", examine, ("budget", "all", "listen"))
    if check and examine == "listen":
        raise UsageError('watch: check=True replays a step, and examine="listen" none', remedy="leave out one of them")
    roots = _several(model, nn.Module, "model")
    for root in roots:
        require_python(root)
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        roots.append(loss)
    chosen = _chosen(checks)
    if profile is not False and (not isinstance(profile, int) or profile < 1):
        raise UsageError(f"profile is {profile!r}", remedy="give True, or the number of the step after which it begins")
    forwarding = ForwardingProbe(sinks, alerts)
    forwarding.require_out(out)
    folder = None if out is None else RunFolder.create(Path(out).parent, Path(out).name)
    if folder is not None:
        folder.write_json("model.json", model_facts(roots))
    optimizers = _optimizers(optimizer, roots)
    reference = None if like is None else ReferenceProbe(like)
    profiled = None if profile is False else _profiling(profile, roots, optimizers, _listed(loader), folder)
    bundles, to_skip = folder.bundles if folder else None, _to_skip(skip)
    are_foreign = any(isinstance(each, ForeignOptimizer) for each in optimizers)

    def objects() -> LoopObjects:
        by_layer = layer_probes(roots, optimizers) if layers and folder is not None else []
        further: tuple[Probe | None, ...] = (
            profiled,
            reference,
            forwarding if forwarding.is_needed else None,
            *by_layer,
        )
        return LoopObjects(
            loaders=_listed(loader),
            schedulers=_listed(scheduler),
            accumulation=accumulation,
            patience_s=patience_s,
            probes=tuple(each for each in further if each is not None),
        )

    def options() -> WatchOptions:
        held_bytes = memory_bytes or enough_bytes(roots)
        nonfinite = "observe" if are_foreign else on_nonfinite  # their updates cannot be skipped
        return WatchOptions(nonfinite, on_spike, keep, held_bytes, bundles, to_skip, *chosen, examine, check=check)

    return Watch(
        roots,
        optimizers,
        objects,
        options,
        folder=folder,
        console=None if quiet else Console(stderr=True),
        forwarding=forwarding,
        profile=profiled,
    )


def _figure(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"log: {name} is a {type(value).__name__}"
        remedy = "give a number, a tensor of one element, tw.Image(value) or tw.Histogram(value)"
        raise UsageError(what, remedy=remedy) from error


T = TypeVar("T")


def _several(value: object, kind: type[T], what: str) -> list[T]:
    items = [value] if isinstance(value, kind) else list(value) if isinstance(value, Iterable) else [value]
    for item in items:
        if not isinstance(item, kind):
            raise UsageError(f"watch: the {what} is a {type(item).__name__}", remedy=f"give a torch {kind.__name__}")
    if not items:
        raise UsageError(f"watch: there is no {what}", remedy=f"give the {what} of the loop, or a list of all of them")
    return [item for item in items if isinstance(item, kind)]


def _optimizers(value: object, roots: Sequence[nn.Module]) -> list[Optimizer]:
    """Returns the torch optimizers in ``value`` and in its wrappers. A ForeignOptimizer represents any other one."""
    several = value if isinstance(value, Iterable) and not hasattr(value, "step") else [value]
    found: list[Optimizer] = []
    for given in several:
        inner = optimizers_in(given)
        if not inner and ForeignOptimizer.can_stand_for(given):
            inner = [ForeignOptimizer(given, [p for root in roots for p in root.parameters() if p.requires_grad])]
        if not inner:
            raise UsageError(f"watch: the optimizer is a {type(given).__name__}", remedy="give a torch Optimizer")
        found += [each for each in inner if each not in found]
    if not found:
        raise UsageError("watch: there is no optimizer", remedy="give that of the loop, or a list of all of them")
    return found


def _to_skip(value: str | Path | Iterable[Iterable[int]]) -> frozenset[frozenset[int]]:
    """Returns the sample ids of each step whose update is skipped."""
    if isinstance(value, str | Path):
        log = read(RunFolder.open(value).log).records
        value = [each.sample_ids for each in log if isinstance(each, records.Skipped)]
    return frozenset(frozenset(ids) for ids in value if ids)


def _chosen(
    checks: str | UserCheck | Sequence[str | UserCheck],
) -> tuple[tuple[Check, ...], tuple[UserCheck, ...]]:
    """Returns the checks that are selected by name, and the user-defined ones."""
    every = list(checks) if isinstance(checks, list | tuple) else [checks]
    names = [each for each in every if isinstance(each, str)]
    own = tuple(each for each in every if callable(each))
    if len(names) + len(own) < len(every):
        raise UsageError("checks: some are neither names nor functions", remedy="give names, or functions of a session")
    return choose_checks(names), own


def _listed(value: object) -> tuple[object, ...]:
    items = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(unwrapped(item) for item in items)


def _profiling(
    profile: int,
    roots: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    loaders: Sequence[object],
    folder: RunFolder | None,
) -> ProfileProbe:
    from trainwright.watching.profiled import WARMUP_STEPS, ProfileProbe  # takes 0.1 s

    return ProfileProbe(roots, optimizers, loaders, folder, WARMUP_STEPS if profile is True else profile)
