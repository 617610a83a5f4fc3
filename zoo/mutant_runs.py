"""Runs hosts and mutants: plainly, to judge what a change does to them, and under ``tw.watch``."""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainwright as tw
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.check import State
from trainwright.runlog.records import Found
from trainwright.watching.watch import Watch as WatchOf
from zoo.further import quality as further_quality
from zoo.hosts import quality
from zoo.hosts.quality import Quality
from zoo.hosts.report import Report, Watch
from zoo.mutate import FURTHER, Mutant, program

Train = Callable[[Watch, int], object]
PLAIN_S, WATCHED_S = 6, 60
"""After so many seconds of the processor a run is given up: some changes make a program endless."""
AT_ONCE = 2
"""A program that raises within so many steps is not silent."""
HOST_SEEDS, MUTANT_SEEDS = 8, 3
CONFIRMED = range(HOST_SEEDS, 2 * HOST_SEEDS)
"""Seeds that no verdict has used: one that is not plain is taken again with all of them."""
WORSE, APART, PLAIN = 2.0, 3.0, 10.0
"""In standard deviations of the host over its seeds: the median of three runs lies outside of 2 in 0.7 % of the time
where nothing is wrong (Student's t, 7 degrees of freedom). What is shown is several numbers, so 3 there. At 10 one
seed is enough."""

CERTAIN = "graphs are kept", "the model cannot be used"
"""What no seed changes."""


class TooSlow(Exception):
    """A run took longer than it may."""


@dataclass(frozen=True)
class Outcome:
    """A plain run. ``bits`` is a hash of its losses, weights and what it shows; ``steps`` how far it came.

    There is no quality where the judge could not use the model.
    """

    steps: int
    error: str | None = None
    bits: str = ""
    quality: Quality = field(default_factory=dict)
    shown: Quality = field(default_factory=dict)
    holds_graph: bool = False

    @property
    def gaps(self) -> Quality:
        """What is shown against what is true."""
        return {name: value - self.quality[name] for name, value in self.shown.items() if name in self.quality}


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; nobody would call a thing worse for less than a hundredth."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        mean = statistics.mean(values)
        return cls(mean, max(statistics.stdev(values, mean), 0.01 * abs(mean), 1e-9))

    def off(self, value: float) -> float:
        """How many deviations above the mean; infinite for what is no number."""
        return (value - self.mean) / self.std if value == value else float("inf")


@dataclass(frozen=True)
class Verdict:
    """What a change does. ``kind`` is harmful, harmless, equivalent, raises, raises late or slow."""

    kind: str
    why: str = ""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises TooSlow in what runs longer; for the main thread of a process."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def loaded(host: str, source: str) -> Iterator[Callable[[Watch, int], Report]]:
    """The program from a file of its own, whose lines a finding can point at."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{host}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"mutant_{host}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
            yield module.train
        finally:
            del sys.modules[spec.name]


def silent_watch(*args: object, **kwargs: object) -> nullcontext[None]:
    """In place of ``tw.watch``: nobody watches."""
    return nullcontext()


def run_plainly(host: str, source: str, seed: int) -> Outcome:
    """The program without a watch, and how good its model is."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    counted = register_optimizer_step_post_hook(count)
    try:
        with warnings.catch_warnings(), limit(PLAIN_S):
            warnings.simplefilter("ignore")
            with loaded(host, source) as train:
                report = train(silent_watch, seed)
        shown = {name: float(value) for name, value in report.shown.items()}
        bits, holds = _bits(report), any(isinstance(each, Tensor) and each.grad_fn for each in report.losses)
    except TooSlow:
        return Outcome(steps, "TooSlow")
    except Exception as raised:
        return Outcome(steps, f"{type(raised).__name__}: {raised}"[:120])
    finally:
        counted.remove()
        torch.set_grad_enabled(True)
    judges = further_quality if host in FURTHER else quality
    try:
        return Outcome(steps, None, bits, judges.quality_of(host, report), shown, holds)
    except Exception:
        return Outcome(steps, None, bits, {}, shown, holds)


def _bits(report: Report) -> str:
    digest = hashlib.sha256(repr([float(each) for each in report.losses]).encode())
    digest.update(repr({name: float(value) for name, value in report.shown.items()}).encode())
    for name, value in (*report.model.state_dict().items(), *report.parts.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@cache
def host_outcomes(host: str) -> tuple[Outcome, ...]:
    return tuple(run_plainly(host, program(host).source, seed) for seed in range(HOST_SEEDS))


def verdict(host: str, source: str) -> Verdict:
    """What a changed program is: judged over seeds, until two of three agree, and confirmed by eight others.

    Of a thousand changes that do nothing some look harmful in two runs of three: those are harmless.
    """
    first = run_plainly(host, source, 0)
    if first.error == "TooSlow":
        return Verdict("slow")
    if first.error is not None:
        return Verdict("raises" if first.steps <= AT_ONCE else "raises late", first.error)
    if first.bits == host_outcomes(host)[0].bits and not first.holds_graph:
        return Verdict("equivalent")
    harms = [harm(host, first)]
    while harms.count("") < 2 and len(harms) - harms.count("") < 2 and not _is_plain(host, first):
        other = run_plainly(host, source, len(harms))
        harms.append(other.error or harm(host, other))
    found = [each for each in harms if each]
    if len(found) <= harms.count(""):
        return Verdict("harmless", "".join(found))
    is_sure = _is_plain(host, first) or found[0] in CERTAIN
    return Verdict("harmful" if is_sure or _is_confirmed(host, source) else "harmless", found[0])


def _is_confirmed(host: str, source: str) -> bool:
    """Whether most runs with further seeds do harm, too."""
    again = [run_plainly(host, source, seed) for seed in CONFIRMED]
    return sum(bool(each.error or harm(host, each)) for each in again) > len(again) / 2


def _is_plain(host: str, seen: Outcome) -> bool:
    """Whether one seed is enough: so far off that no other could change the median."""
    name = next(iter(host_outcomes(host)[0].quality))
    spread = Spread.of([each.quality[name] for each in host_outcomes(host)])
    return spread.off(seen.quality.get(name, float("inf"))) > PLAIN


def harm(host: str, seen: Outcome) -> str:
    """What is worse than in the host, in words; nothing where it is within the host's spread."""
    if seen.holds_graph:
        return CERTAIN[0]
    healthy = host_outcomes(host)
    name = next(iter(healthy[0].quality))
    if not seen.quality:
        return CERTAIN[1]
    spread = Spread.of([each.quality[name] for each in healthy])
    if spread.off(seen.quality[name]) > WORSE:
        return f"{name} {seen.quality[name]:.3g}, healthy {spread.mean:.3g} ± {spread.std:.2g}"
    for key in healthy[0].gaps:
        spread = Spread.of([each.gaps[key] for each in healthy])
        if key not in seen.gaps or abs(spread.off(seen.gaps[key])) > APART:
            return f"shows {key} {seen.shown.get(key, float('nan')):.3g}, is {seen.quality[key]:.3g}"
    return ""


@dataclass(frozen=True)
class Watched:
    """A run under the watch: its findings, and what it took. ``modules`` are the classes of its modules by path.

    ``laws`` says what became of each law, by its name; of several watches, of the last.
    """

    found: tuple[Found, ...]
    seconds: float
    steps: int
    error: str | None = None
    failures: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    laws: Mapping[str, State] = field(default_factory=dict)

    @property
    def alarms(self) -> list[Found]:
        return [each for each in self.found if each.severity in ("critical", "warning")]


def run_watched(train: Train, seed: int) -> Watched:
    """A program under ``tw.watch`` with everything at its default."""
    watches: list[WatchOf] = []
    modules: dict[str, str] = {}
    begin_s, error = time.perf_counter(), None

    def watch(folder: Path, model: object, *args: object, **kwargs: object) -> WatchOf:
        for root in model if isinstance(model, list) else [model]:
            modules.update({name: type(each).__name__ for name, each in root.named_modules()})
        watches.append(tw.watch(model, *args, **kwargs, out=folder / "run", quiet=True))
        return watches[-1]

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limit(WATCHED_S):
                train(partial(watch, Path(folder)), seed)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:200]
        finally:
            torch.set_grad_enabled(True)
        found = tuple(each for one in watches for each in one.findings())
    failures = [str(each) for one in watches for each in one.session.failures]
    failures += [each.symptom for each in found if each.code == "doctor.failed"]
    seconds = round(time.perf_counter() - begin_s, 2)
    laws = {law.name: law.state for one in watches for law in diagnose(Case(one.records, finished=True)).laws}
    return Watched(found, seconds, sum(one.step for one in watches), error, tuple(failures), modules, laws)


def watched_mutant(mutant: Mutant | None, host: str, seed: int) -> Watched:
    """The mutant, or the host itself where there is none."""
    with loaded(host, mutant.source if mutant else program(host).source) as train:
        return run_watched(train, seed)
