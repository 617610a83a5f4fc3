"""Climbs a ladder: trains each rung in a separate process and run folder, and keeps the changes that hold and pay.

Does not import torch: every rung is a trial (``trainwright.trials``). Finished rungs are read from their run folders,
so a ladder that was killed continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainwright.commands.ladder.result import (
    BAND_FACTOR,
    BEST,
    HEAD,
    MIN_BAND,
    PAGE,
    REPORT,
    Band,
    Ladder,
    MeasuredRung,
    RungResult,
    RungVerdict,
    band_of,
    commented,
    judge,
    measured,
    new_finding,
    notes_of,
    unhealthy,
)
from trainwright.commands.ladder.rungs import (
    BASELINE,
    SECOND_SEED,
    Rung,
    batch_settings,
    divided_length,
    length_settings,
    rungs_of,
    steps_of,
    words,
)
from trainwright.errors import UsageError
from trainwright.plan.batch import batch_of
from trainwright.recipe import Loaded, dump_masked, load
from trainwright.report.chart import Mark, Series, line_chart_svg
from trainwright.runs.files import UnreadableFile, parse_json, read_text
from trainwright.runs.lock import is_locked
from trainwright.runs.provenance import modules_of
from trainwright.runs.storage import write_atomically
from trainwright.trials.trial import CHILD_PROGRAM, read_trial, run_trial

MAX_SLOWDOWN = 4.0
"""Time of a rung / time of the baseline above which the rung is stopped, because it does not pay."""
STARTUP_S = 120.0
"""Additional seconds for the start of a process."""
COMPILE_S = 600.0
"""Additional seconds to compile the model."""
RANGE_STEPS = 100
POLL_S = 0.5
MAX_REASON_CHARS = 300


def ladder(
    recipe: str | Path,
    *,
    settings: Sequence[str] = (),
    steps: int | None = None,
    samples: int | None = None,
    budget_s: float = math.inf,
    skip: Sequence[str] = (),
    folder: str | Path | None = None,
    threads: int | None = None,
    quiet: bool = False,
    say: Callable[[str], None] | None = None,
) -> Ladder:
    """Go from a float32 baseline to a fast run, one change at a time, on the same data, seed and number of samples.

    Args:
        recipe: The path of a recipe, or the name of a built-in one.
        settings: Overrides of the recipe, ``"path=value"``.
        steps: Optimizer steps of the baseline. Default: the recipe's steps, at most 200.
        samples: The length of the baseline in samples, instead of steps.
        budget_s: Seconds after which no further rung starts.
        skip: Names of rungs to leave out, such as ``"fp16"``.
        folder: The folder for runs, table, page and best recipe. Default: ``<name>-ladder`` in the folder of the
            recipe's runs. An unfinished ladder in it is resumed.
        threads: CPU threads of each run. Default: ``OMP_NUM_THREADS``, or all cores.
        quiet: Print nothing.
        say: Receives the lines of progress instead of ``print``. The table is then not printed.

    Returns:
        The table, and the best recipe; ``exit_code`` is 3 if a rung breaks.

    Raises:
        UsageError: The recipe is not a path or name, or the number of steps is too small.
        RecipeError: The recipe or a setting is wrong.

    Example:
        >>> found = tw.ladder("recipes/demo-digits.yaml", steps=100)
        >>> found.best_recipe
    """
    passed: object = recipe
    if not isinstance(passed, str | Path):
        rule = f"ladder takes the path or name of a recipe, not a {type(passed).__name__}"
        remedy = "each rung is a separate process: write a recipe with model.use: module:callable"
        raise UsageError(rule, remedy=remedy)
    loaded = load(recipe, overrides=settings)
    count = steps_of(loaded.recipe, steps, samples)
    name = f"{loaded.recipe.name[:80]}-ladder"
    place = Path(folder) if folder is not None else Path(loaded.recipe.folder) / name
    length = words(length_settings(loaded.recipe, count))
    load(recipe, overrides=[*settings, *length])  # raises for a warm-up that does not fit
    show = say or ((lambda _text: None) if quiet else print)
    end_s = time.monotonic() + budget_s
    climb = _Climb(Path(recipe), tuple(settings), loaded, count, place, threads or _threads(), end_s, show)
    found = climb.run([*rungs_of(loaded.recipe, skip)])
    if say is None:
        show("\n".join(found.lines()))
    return found


def _threads() -> int:
    with suppress(ValueError, KeyError):
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _AdoptedRung:
    """The last rung that was adopted, on which the next one builds. ``anchor``: see ``worse``.

    ``factor`` is its batch size relative to the recipe's. ``decided`` maps recipe paths to the rungs that decided them.
    """

    name: str
    settings: dict[str, str]
    measured: MeasuredRung
    anchor: float
    optimizer: str
    factor: int = 1
    decided: dict[str, str] = field(default_factory=dict)


@dataclass
class _Climb:
    """A ladder in progress. ``_limit_s`` is the time after which a rung is stopped.

    ``_known`` are the codes of findings in the rungs below. ``_slow`` are the run folders of rungs that were stopped.
    """

    _recipe: Path
    _settings: tuple[str, ...]
    _loaded: Loaded
    _steps: int
    _folder: Path
    _threads: int
    _end_s: float
    _say: Callable[[str], None]
    _limit_s: float = math.inf
    _rows: list[RungResult] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _out_of_time: bool = False

    def __post_init__(self) -> None:
        self._batch = batch_of(self._loaded.recipe.batch, None).size
        self._folder.mkdir(parents=True, exist_ok=True)
        self._slow = self._slow_before()

    def run(self, rungs: Sequence[Rung]) -> Ladder:
        """Try the rungs in order until one breaks."""
        held, band = self._baseline()
        if held is None or band is None:
            return self._write_files(None, None)
        for rung in rungs:
            if time.monotonic() > self._end_s and not rung.why_not:
                self._out_of_time = True
                rung = replace(rung, why_not="the budget is used up")
            row = self._try(rung, held, band)
            self._add(row)
            if row.verdict.outcome == "adopted" and row.measured:
                held = self._adopt(rung, row, row.measured, held, band)
            self._write_files(held, band)
            if row.verdict.outcome == "breaks":
                break
        return self._write_files(held, band)

    def _baseline(self) -> tuple[_AdoptedRung | None, Band | None]:
        """Train the baseline with two seeds. Returns (None, None), which ends the ladder, if the baseline breaks."""
        seed, settings = self._loaded.recipe.seed, {"precision": "fp32", "model.compile": "false"}
        begin_s = time.monotonic()
        one, row = self._train(BASELINE, settings, 1)
        took_s = max(time.monotonic() - begin_s, 0.0)
        verdict = _baseline_verdict(one, _warnings(one))
        if one.steps == 0:
            raise UsageError(f"the baseline does not train: {one.reason}", remedy=f"trainwright check {self._recipe}")
        self._add(replace(row, verdict=verdict))
        if verdict.outcome == "breaks":
            return None, None
        if row.run:
            took_s = max(took_s, read_trial(row.run).seconds)
        self._limit_s = MAX_SLOWDOWN * took_s + STARTUP_S
        two, row = self._train(SECOND_SEED, {**settings, "seed": str(seed + 1 if seed < 2**62 else 0)}, 1)
        verdict = _baseline_verdict(two, _warnings(one) | _warnings(two))
        self._add(replace(row.compared(one, BASELINE), verdict=verdict))
        if verdict.outcome == "breaks":
            return None, None
        self._known = {each.code for each in (*one.serious, *two.serious)}
        return _AdoptedRung(BASELINE, settings, one, one.loss, self._loaded.recipe.optimizer.use), band_of(one, two)

    def _try(self, rung: Rung, held: _AdoptedRung, band: Band) -> RungResult:
        if rung.why_not:
            return RungResult(rung.name, RungVerdict("not tried", rung.why_not), {})
        changes, lr = dict(rung.settings), None
        if rung.kind == "batch":
            changes = dict(batch_settings(self._loaded.recipe, rung.factor, held.optimizer))
        if rung.kind == "optimizer":
            lr, why_not = self._range_test(rung, {**held.settings, **changes})
            if lr is None:
                return RungResult(rung.name, RungVerdict("not tried", why_not), changes)
            changes["optimizer.lr"] = f"{lr:.3g}"
        settings = {**held.settings, **changes}
        rung_measured, row = self._train(rung.name, settings, rung.factor)
        row = replace(row, lr=lr, below=held.name)
        if rung_measured.ended == "stopped":
            why = f"it took more than {MAX_SLOWDOWN:g} times as long as the baseline, and was stopped"
            return replace(row, verdict=RungVerdict("too slow", why), measured=None)
        if rung_measured.steps == 0:
            return replace(row, verdict=RungVerdict("not tried", _in_one_line(rung_measured.reason)), measured=None)
        verdict = judge(rung.kind, rung_measured, held.measured, held.anchor, band, self._known)
        return replace(row.compared(held.measured, held.name), verdict=verdict)

    def _adopt(self, rung: Rung, row: RungResult, found: MeasuredRung, held: _AdoptedRung, band: Band) -> _AdoptedRung:
        is_better = held.measured.loss - found.loss > band.loss
        changes = {path: value for path, value in row.settings.items() if held.settings.get(path) != value}
        self._known |= {each.code for each in found.serious}
        return _AdoptedRung(
            rung.name,
            dict(row.settings),
            found,
            found.loss if is_better else held.anchor,
            rung.settings.get("optimizer.use", held.optimizer),
            rung.factor if rung.kind == "batch" else held.factor,
            {**held.decided, **dict.fromkeys(changes, rung.name)},
        )

    def _train(self, name: str, settings: dict[str, str], factor: int) -> tuple[MeasuredRung, RungResult]:
        """Train one run, or read it if it is finished."""
        length = length_settings(self._loaded.recipe, self._steps, factor)
        measuring = {"log.every": "1steps", "log.sinks": "[]", "alerts": "null"}
        overrides = [*self._settings, *words({**measuring, **length, **settings})]
        folder = self._folder / f"{name}-{self._digest(overrides)}"
        if folder.name in self._slow:
            trial = read_trial(folder)
        else:
            self._say(f"{name} ...")
            self._wait_for(folder)
            limit_s = self._limit_s + (COMPILE_S if settings.get("model.compile") == "true" else 0.0)
            trial = run_trial(self._recipe_file(), overrides, folder, threads=self._threads, limit_s=limit_s)
            if trial.ended == "stopped":
                self._slow.add(folder.name)
        if trial.ended not in ("finished", "failed", "stopped"):
            trial = replace(trial, reason=trial.reason or f"its process ended, {trial.ended}")
        found = measured(trial, self._batch * factor)
        return found, RungResult(name, RungVerdict("baseline"), settings, folder, found)

    def _wait_for(self, folder: Path) -> None:
        """Wait until a run that a killed process of this ladder started has saved after its step and ended."""
        end_s = time.monotonic() + STARTUP_S + COMPILE_S
        while is_locked(folder) and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _recipe_file(self) -> Path:
        """Return the file of the recipe, not the name of a built-in one: a folder here may have the same name."""
        return Path(self._loaded.source.name)

    def _digest(self, settings: Sequence[str]) -> str:
        """Return an identifier of the run: another recipe, or other settings, have another run folder."""
        text = dump_masked(load(self._recipe_file(), overrides=list(settings)).recipe)
        return hashlib.sha256(f"{text}\n{self._threads}".encode()).hexdigest()[:8]

    def _range_test(self, rung: Rung, settings: dict[str, str]) -> tuple[float | None, str]:
        """Return the learning rate that a range test finds, or the reason for none."""
        overrides = [*self._settings, *words({**length_settings(self._loaded.recipe, self._steps), **settings})]
        file = self._folder / f"{rung.name}-lr-{self._digest(overrides)}.json"
        with suppress(UnreadableFile, ValueError):
            found = parse_json(read_text(file))
            if isinstance(found, dict):
                return _suggested(found)
        self._say(f"{rung.name}: range test of the learning rate ...")
        command = ["lr-range", str(self._recipe_file()), "--steps", str(RANGE_STEPS), "--json"]
        command += ["--out", str(file.with_suffix(".svg")), *(word for each in overrides for word in ("--set", each))]
        try:
            done = subprocess.run(
                [sys.executable, "-c", CHILD_PROGRAM.format(parent=os.getpid()), *command],
                capture_output=True,
                text=True,
                check=False,
                timeout=self._limit_s + (COMPILE_S if settings.get("model.compile") == "true" else 0.0),
                env=self._environ(),
            )
        except subprocess.TimeoutExpired:
            return None, "the range test of its learning rate took too long"
        if done.returncode != 0:
            return None, f"the range test failed: {_in_one_line(done.stderr.rpartition('error: ')[2])}"
        text = done.stdout.strip().splitlines()[-1]
        write_atomically(file, text + "\n", durable=False)
        return _suggested(json.loads(text))

    def _environ(self) -> dict[str, str]:
        paths = filter(None, (os.environ.get("PYTHONPATH"), str(self._recipe_file().absolute().parent)))
        return {**os.environ, "OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": os.pathsep.join(paths)}

    def _add(self, row: RungResult) -> None:
        self._rows.append(row)
        self._say(f"{row.name}: {row.verdict}")

    def _slow_before(self) -> set[str]:
        """Return the names of the run folders that an earlier process of this ladder stopped because they were slow."""
        with suppress(UnreadableFile, ValueError, KeyError, TypeError):
            found = parse_json(read_text(self._folder / REPORT))
            rungs = found["rungs"] if isinstance(found, dict) else []
            return {Path(str(each["run"])).name for each in rungs if each["outcome"] == "too slow"}
        return set()

    def _write_files(self, held: _AdoptedRung | None, band: Band | None) -> Ladder:
        """Write the current table, page and best recipe, so that a ladder that is killed leaves them."""
        found = Ladder(self._folder, str(self._recipe), self._steps, self._batch, tuple(self._rows), band)
        found = replace(found, out_of_time=self._out_of_time)
        if held is not None:
            self._write_best(held)
            length = length_settings(self._loaded.recipe, self._steps, held.factor)
            train, repeat = self._commands(words(length))
            found = replace(found, best=held.name, train=train, repeat=repeat)
        write_atomically(self._folder / REPORT, json.dumps(found.to_json(), indent=1) + "\n", durable=False)
        write_page(self._folder / PAGE, found)
        return found

    def _commands(self, length: Sequence[str]) -> tuple[str, str]:
        """Return two commands: train the best recipe; repeat its rung with the same threads and length."""
        has_modules = bool(modules_of(self._loaded.recipe.model_dump(mode="json")))
        beside = self._recipe_file().absolute().parent
        variables = [f"PYTHONPATH={shlex.quote(str(beside))}"] if has_modules else []
        train = f"trainwright train {shlex.quote(str(self._folder / BEST))}"
        sets = [f"--set {each}" for each in length]
        same = [f"OMP_NUM_THREADS={self._threads}", *variables, train, *sets]
        return " ".join([*variables, train]), " ".join(same)

    def _write_best(self, held: _AdoptedRung) -> None:
        """Write the best recipe with a comment at each line that was decided by the recipe or a rung."""
        length = divided_length(self._loaded.recipe, held.factor)
        loaded = load(self._recipe_file(), overrides=[*self._settings, *words({**held.settings, **length})])
        notes = dict.fromkeys(self._loaded.stated, "of the recipe")
        notes |= dict.fromkeys(self._loaded.overridden, "--set")
        notes |= notes_of(self._rows, {"precision": BASELINE, "model.compile": BASELINE, **held.decided})
        notes |= dict.fromkeys(length, f"ladder, {held.name}: as many samples as before")
        path = self._folder / BEST
        head = [
            f"# The recipe of the rung {held.name}, written by: trainwright ladder {self._recipe}",
            f"# Each rung was trained on {self._steps * self._batch:,} samples; {PAGE} and {REPORT} compare them.",
            "# A line without a comment has its default.",
        ]
        write_atomically(path, "\n".join(head) + "\n" + commented(dump_masked(loaded.recipe), notes), durable=False)


def _baseline_verdict(found: MeasuredRung, known: set[str]) -> RungVerdict:
    why = unhealthy(found, known)
    return RungVerdict("breaks", why, new_finding(found, known)) if why else RungVerdict("baseline")


def _warnings(found: MeasuredRung) -> set[str]:
    """Return the codes of warnings. They do not break the baseline, because rungs are only compared with it."""
    return {each.code for each in found.serious if each.severity == "warning"}


def _suggested(found: dict[str, object]) -> tuple[float | None, str]:
    rate = found.get("suggestion")
    if isinstance(rate, float | int) and rate > 0:
        return float(rate), ""
    return None, "in the range test the loss never fell by 1 %"


def _in_one_line(text: str) -> str:
    """Return an error message without the count of its problems, the place and the remedy, which concern the child."""
    line = re.sub(r"^(the recipe has \d+ problems?: )?(--set [\w.]+: )?", "", " ".join(text.split()))
    return line.partition(" remedy: ")[0][:MAX_REASON_CHARS] or "it did not start"


def write_page(path: Path, found: Ladder) -> None:
    """Write the page. Raises StorageError if it cannot be written."""
    from trainwright.report.pages.render import ladder_page  # imports jinja2

    page = ladder_page(
        found, head=HEAD, pictures=pictures(found), best=BEST, differences=BAND_FACTOR, least=f"{MIN_BAND:.0%}"
    )
    write_atomically(path, page, durable=False)


def pictures(found: Ladder) -> list[tuple[str, str]]:
    """Return names and SVGs: the training loss of each rung by samples, and the final losses with the band."""
    trained = [rung for rung in found.rungs if rung.measured]
    drawn = [("Training loss", _curves(found, trained))]
    finals = [(index, rung.measured.loss) for index, rung in enumerate(trained) if rung.measured]
    if found.band and finals:
        base = finals[0][1]
        marks = [
            Mark("y", base + found.band.loss, "baseline + band"),
            Mark("y", base - found.band.loss, "baseline - band"),
        ]
        line = Series("final loss", [index for index, _ in finals], [loss for _, loss in finals])
        label = "rung: " + ", ".join(f"{index} {rung.name}" for index, rung in enumerate(trained))
        svg = line_chart_svg([line], title="Final loss", x_label=label, y_label="loss", marks=marks)
        drawn.append(("Final loss", svg))
    return drawn


def _curves(found: Ladder, trained: list[RungResult]) -> str:
    series = []
    for rung in trained:
        assert rung.measured
        count, samples = len(rung.measured.curve), found.steps * found.batch
        x = [samples * (index + 1) / count for index in range(count)]
        series.append(Series(rung.name, x, rung.measured.curve))
    return line_chart_svg(series, title="Training loss, mean of each window", x_label="samples", y_label="loss")
