"""``plan RECIPE``: shows the forecast of a run as text and as JSON."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.assembly.assemble import Parts
from trainwright.errors import TrainwrightError, UsageError, text_of
from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.devices import FRAGMENTATION_FRACTION, Device, known_devices, load_devices
from trainwright.plan.explain import memory_in_words, step_in_words
from trainwright.plan.layout import Option
from trainwright.plan.make import Note, Plan
from trainwright.plan.many_ranks import (
    ManyRanks,
    Placement,
    best_of,
    choice_notes,
    is_trainable,
    layouts_of,
    runners_up,
)
from trainwright.plan.parallel import AXES, in_one_process, solve_layout
from trainwright.plan.trace.finetuning import MethodForecast, compares_methods, finetuning_precision, forecast_methods
from trainwright.plan.trace.local_device import named_device
from trainwright.plan.trace.many_ranks import options_of, survey_ranks
from trainwright.plan.trace.run_forecast import Forecast, forecast
from trainwright.recipe import Loaded
from trainwright.recipe.formatting import parse_bytes
from trainwright.report.forecast import (
    layout_lines,
    machine_line,
    memory_by_stage,
    memory_lines,
    placement_lines,
    runner_up_lines,
    timeline_text,
    traffic_lines,
    usable_line,
)
from trainwright.training.custom_objects import require_loss
from trainwright.training.prepare import prepare
from trainwright.training.problems import all_problems_reported
from trainwright.training.run import process_settings

MAX_DRY_RUN_STEP_S = 2.0
"""Step time by the roofline model above which a plan does no dry run."""


@dataclass(frozen=True)
class ShownPlan:
    """A forecast and its output. ``exit_code`` is 3 if the recipe does not fit as it stands.

    ``recipe`` is its name on the command line; "" for live objects.
    """

    forecast: Forecast
    planned_s: float
    recipe: str
    measured: Plan | None = None
    """The plan of a run on this machine with its dry run; None without a dry run, as for another device."""
    why_not_measured: str = ""
    methods: tuple[MethodForecast, ...] = ()
    """Full fine-tuning, LoRA and QLoRA, for a recipe with a pretrained model."""
    devices: tuple[Device, ...] = ()
    """The devices for which the run is priced."""

    @property
    def exit_code(self) -> int:
        return 0 if self.forecast.written.fits else 3

    def lines(self) -> list[str]:
        made, device = self.forecast, self.forecast.device
        trained = "" if made.trainable == made.parameters else f", {made.trainable:,} of them trained"
        lines = [
            f"plan        {made.name}: {made.parameters:,} parameters{trained}, {made.size} samples a step",
            f"device      {usable_line(device)}",
            f"  figures   {device.source}",
            *layout_lines(made.written, device, "as written"),
            *self._measured(),
            "",
            *timeline_text(made.trace, device.usable_bytes, self.title),
            *memory_lines(made.trace),
            f"if all were held at once {memory_in_words({str(kind): size for kind, size in made.trace.held.items()})}",
            "",
            *self._choice(),
            *(f"  {note.topic:<13} {note.choice}: {note.why}" for note in made.notes),
        ]
        fine_tuning = [*method_lines(self.methods, device), *price_lines(self.methods, self.devices)]
        return [*lines, *self._unseen(), *fine_tuning, f"planned in {human_seconds(self.planned_s)}"]

    def _measured(self) -> list[str]:
        """Return lines on the dry run that ``train`` does, too, or why there is none, and what its times exclude."""
        beside = "evaluation, checkpoints, the doctor, logging and other programs come on top"
        plan = self.measured
        if plan is None or plan.predicted.step_s is None:
            why = f"; not measured: {self.why_not_measured}" if self.why_not_measured else ""
            return [f"  without   reading data and the time of the interpreter{why}; {beside}"]
        lines = [
            f"  measured  {step_in_words(plan.predicted.step_s, plan.predicted.wait_s)} in a dry run here; {beside}"
        ]
        return lines + [
            f"  {note.topic:<9} {note.choice}: {note.why}"
            for note in plan.notes
            if note.topic in ("precision", "workers")
        ]

    @property
    def title(self) -> str:
        """Title of the timeline: the layout whose memory it shows."""
        made, option = self.forecast, self.forecast.shown
        nearest = "the nearest fit" if made.choice.fits else "the layout that holds least"
        which = "as written" if made.written.fits else f"{nearest}, not as written"
        layout, cut = option.layout, f"{option.micro} x {option.accumulation}"
        return f"{which}: {cut}, {layout.precision}, checkpointing {layout.checkpointing}"

    def _choice(self) -> list[str]:
        made = self.forecast
        if not made.choice.fits:
            lines = ["no layout with the same training fits. Changes to the training that help, each alone:"]
            signs = {"here": "can be done", "devices": "more devices"}
            return lines + [
                f"  {signs[remedy.means] if remedy.fits else 'not enough':<14} {remedy.line()}"
                + "".join(f"\n  {'':<14} --set '{setting}'" for setting in remedy.settings if remedy.fits)
                for remedy in made.remedies
            ]
        if not made.settings:
            return ["best layout  the recipe as it stands"]
        flags = " ".join(f"--set {setting}" for setting in made.settings)
        title = "best layout" if made.written.fits else "nearest fit"
        command = f"  trainwright train {self.recipe} {flags}"
        if not self.recipe:
            command = f"  tw.fit(..., settings={dict(each.split('=', 1) for each in made.settings)})"
        return [*layout_lines(made.choice.best, made.device, title), command]

    def _unseen(self) -> list[str]:
        lines = []
        for each in self.forecast.trace.unseen:
            bound = "size not known" if each.bound_bytes is None else f"at most {human_bytes(each.bound_bytes)}"
            bound += self._left_for(each.op)
            lines.append(f"  not seen      {each.op}{f' in {each.module}' if each.module else ''}: {each.why}; {bound}")
        return lines

    def _left_for(self, op: str) -> str:
        """Return a text on the memory that is reserved for this operation and not counted as usable; "" for none."""
        if op == "context":
            return ", left out of what is usable"
        margin = human_bytes(FRAGMENTATION_FRACTION * self.forecast.device.memory_bytes)
        return f"; {margin} are left out of what is usable for them" if op == "reserved" else ""

    def to_json(self) -> dict[str, object]:
        made, device = self.forecast, self.forecast.device
        peak = made.trace.peak
        return {
            "recipe": made.name,
            "device": {"name": device.name, "memory_bytes": device.memory_bytes, "usable_bytes": device.usable_bytes},
            "parameters": made.parameters,
            "trainable": made.trainable,
            "fits": made.written.fits,
            "written": _option(made.written),
            "best": _option(made.choice.best),
            "settings": list(made.settings),
            "options": [_option(option) for option in made.choice.options],
            "peak": {"phase": peak.phase, "module": peak.module, "op": peak.op, "held": dict(peak.held)},
            "resident": dict(made.trace.resident),
            "kept": dict(made.trace.kept),
            "unseen": [vars(each) for each in made.trace.unseen],
            "remedies": [{**vars(each), "settings": list(each.settings)} for each in made.remedies],
            "notes": [vars(note) for note in made.notes],
            "methods": [_method(each, device) for each in self.methods],
            "prices": [_price(self.methods, each) for each in self.devices if self.methods],
            "held": dict(made.trace.held),
            "measured": _measured(self.measured),
            "planned_s": self.planned_s,
            "exit": self.exit_code,
        }


def method_lines(methods: Sequence[MethodForecast], device: Device) -> Iterator[str]:
    """Yield a table: which method fits a device, and with which length of a sequence."""
    if not methods:
        return
    tokens = methods[0].tokens
    yield ""
    yield f"fine-tuning on {device.name}, one sequence at a time, blocks recomputed, {finetuning_precision(device)}"
    yield f"  {'method':<7} {'trained':>15} {f'at {tokens:,} tokens':>16} {'fits':>5} {'longest sequence':>17}"
    for each in methods:
        at = each.at(tokens, device)
        longest = each.longest(device)
        limit = " (the model's limit)" if longest >= each.max_tokens // 64 * 64 else ""
        fits = "yes" if at.fits else "no"
        yield (
            f"  {each.method:<7} {each.trainable:>15,} {human_bytes(at.peak_bytes):>16} {fits:>5} "
            f"{f'{longest:,}' if longest else 'none':>17}{limit}"
        )
        if each.settings:
            yield f"          {' '.join(f'--set {shlex.quote(setting)}' for setting in each.settings)}"


def price_lines(methods: Sequence[MethodForecast], devices: Sequence[Device]) -> Iterator[str]:
    """Yield a table: time and price of the steps of the run on each device."""
    if not methods or methods[0].steps is None:
        return
    yield ""
    yield f"time and price of {methods[0].steps:,} steps of {methods[0].sequences} sequences, by the roofline model"
    yield f"  {'device':<15} {'$ an hour':>9}  {'  '.join(f'{each.method:<22}' for each in methods)}".rstrip()
    for device in devices:
        cells = [_run_cell(each, device) for each in methods]
        price = "not known" if device.price is None else f"{device.price:.2f}"
        priced = f"  ({device.priced})" if device.priced else ""
        yield f"  {device.name:<15} {price:>9}  {'  '.join(f'{cell:<22}' for cell in cells).rstrip()}{priced}"


def _run_cell(method: MethodForecast, device: Device) -> str:
    if not method.at(method.tokens, device).fits:
        return "does not fit"
    run_s = method.run_s(device)
    assert run_s is not None
    price = "" if device.price is None else f", ${run_s / 3600 * device.price:.3g}"
    return f"{human_seconds(run_s)}{price}"


def _method(each: MethodForecast, device: Device) -> dict[str, object]:
    at = each.at(each.tokens, device)
    return {
        "method": each.method,
        "trainable": each.trainable,
        "tokens": each.tokens,
        "peak_bytes": at.peak_bytes,
        "fits": at.fits,
        "longest": each.longest(device),
        "settings": list(each.settings),
    }


def _price(methods: Sequence[MethodForecast], device: Device) -> dict[str, object]:
    run_s = {each.method: each.run_s(device) if each.at(each.tokens, device).fits else None for each in methods}
    return {"device": device.name, "price": device.price, "priced": device.priced, "run_s": run_s}


def _option(option: Option) -> dict[str, object]:
    return {
        "micro": option.micro,
        "accumulation": option.accumulation,
        "precision": option.layout.precision,
        "checkpointing": option.layout.checkpointing,
        "chunked_loss": option.layout.chunked,
        "offload": option.layout.offload is not None,
        "host_bytes": option.layout.offload.host_bytes if option.layout.offload else 0,
        "peak_bytes": option.peak_bytes,
        "step_s": option.step_s,
        "flops": option.time.flops,
        "moved_bytes": option.time.moved_bytes,
        "mfu": option.time.mfu,
        "fits": option.fits,
    }


def _measured(plan: Plan | None) -> dict[str, object] | None:
    if plan is None or plan.predicted.step_s is None:
        return None
    held = dict(plan.predicted.memory_bytes or {})
    return {
        "step_s": plan.predicted.step_s,
        "wait_s": plan.predicted.wait_s,
        "precision": plan.precision,
        "memory_bytes": held,
    }


def _dry_run(loaded: Loaded, parts: Parts | None, made: Forecast) -> tuple[Plan | None, str]:
    """Return the plan of a run on this machine with a dry run as in ``train``, or the reason for none."""
    if not made.written.fits:
        return None, "the recipe does not fit"
    if in_one_process(loaded).recipe != loaded.recipe:
        return None, "the recipe is for several ranks"
    if made.written.step_s > MAX_DRY_RUN_STEP_S:
        return None, f"a step takes longer than {human_seconds(MAX_DRY_RUN_STEP_S)}"
    with process_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return prepare(loaded, parts).plan, ""
        except Exception as error:  # an error of user code, which `train` reports with its place
            return None, error.message if isinstance(error, TrainwrightError) else text_of(error, lines=1)


def show_plan(
    loaded: Loaded,
    parts: Parts | None = None,
    *,
    recipe: str,
    device: str | None = None,
    memory: str | None = None,
    devices: Path | None = None,
) -> ShownPlan:
    """Forecast a run of the recipe, or of ``parts`` instead of the objects that the recipe names.

    For this machine, a dry run also measures a step. ``parts`` must not be used afterwards.

    Raises UsageError for an unknown device or size.
    """
    start = time.perf_counter()
    table = known_devices() if devices is None else load_devices(devices)
    target = named_device(device, dict(table), None if memory is None else parse_bytes(memory))
    require_loss(parts, "plan")
    with all_problems_reported(loaded, parts):
        made = forecast(loaded, target, parts=parts)
    is_here = device is None and memory is None
    measured, why_not = _dry_run(loaded, parts, made) if is_here else (None, "")
    with all_problems_reported(loaded, parts):
        methods = forecast_methods(loaded, target, parts) if compares_methods(loaded.recipe) else []
    priced = [each for each in table.values() if each.kind == "cuda" and each.price is not None]
    others = [target] if target.kind == "cuda" and target.name not in {each.name for each in priced} else []
    return ShownPlan(
        made,
        time.perf_counter() - start,
        recipe,
        measured,
        why_not,
        tuple(methods),
        (*others, *sorted(priced, key=lambda each: each.price or 0.0)),
    )


MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class RanksPlan:
    """The layout of the recipe as it stands (``written``), and the best one that the engine can run (``best``)."""

    name: str
    recipe: str
    device: Device
    ranks: int
    size: int
    parameters: int
    written: Placement
    best: Placement
    others: tuple[Placement, ...]
    notes: tuple[Note, ...]
    planned_s: float

    @property
    def exit_code(self) -> int:
        return 0 if self.written.fits else 3

    def lines(self) -> list[str]:
        size = f"{self.parameters:,} parameters, {self.size:,} samples a step, {self.ranks:,} ranks"
        return [
            f"plan        {self.name}: {size}",
            f"device      {usable_line(self.device)}",
            machine_line(self.device),
            *placement_lines(self.written, self.device, "as written"),
            *([] if self.best is self.written else placement_lines(self.best, self.device, "best layout")),
            *([f"  {self.command}"] if self.settings and self.best.fits else []),
            "",
            *memory_by_stage(self.best),
            *traffic_lines(self.best),
            *runner_up_lines(self.others, self.best),
            *(f"  {note.topic:<13} {note.choice}: {note.why}" for note in self.notes),
            f"calculated, not measured, in {human_seconds(self.planned_s)}",
        ]

    @property
    def settings(self) -> tuple[str, ...]:
        """The ``--set`` arguments that lead from the recipe to the best layout."""
        if self.best is self.written:
            return ()
        best = self.best
        found = [f"parallel.{axis}={size}" for axis in AXES if (size := getattr(best.degrees, axis)) > 1]
        found += [f"batch.size={self.size}", f"batch.micro={best.micro}", "batch.accumulation=null"]
        return (*found, f"model.activation_checkpointing={best.policy}")

    @property
    def command(self) -> str:
        """The command that trains with the best layout."""
        each = min(self.device.node.ranks, self.ranks)
        words = [f"--set {setting}" for setting in self.settings]
        return " ".join(
            ["trainwright train", self.recipe, *words, f"-- --nnodes {self.ranks // each} --nproc-per-node {each}"]
        )

    def to_json(self) -> dict[str, object]:
        return {
            "recipe": self.name,
            "device": self.device.name,
            "ranks": self.ranks,
            "samples": self.size,
            "parameters": self.parameters,
            "fits": self.written.fits,
            "written": placement_json(self.written),
            "best": placement_json(self.best),
            "others": [placement_json(each) for each in self.others],
            "settings": list(self.settings),
            "notes": [vars(note) for note in self.notes],
            "planned_s": self.planned_s,
            "exit": self.exit_code,
        }


def placement_json(placed: Placement) -> dict[str, object]:
    """Return a layout for ``--json``."""
    return {
        "degrees": {axis: getattr(placed.degrees, axis) for axis in AXES},
        "zero": placed.zero,
        "checkpointing": placed.policy,
        "micro": placed.micro,
        "accumulation": placed.accumulation,
        "fits": placed.fits,
        "peak_bytes": placed.peak_bytes,
        "stage_bytes": list(placed.stage_bytes),
        "held": dict(placed.held),
        "step_s": placed.step_s,
        "busy_s": placed.busy_s,
        "exposed_s": placed.exposed_s,
        "bubble_s": placed.bubble_s,
        "mfu": placed.mfu,
        "traffic": [each.to_json() for each in placed.traffic],
    }


def plan_ranks(
    loaded: Loaded,
    ranks: int,
    *,
    recipe: str,
    device: str | None = None,
    memory: str | None = None,
    devices: Path | None = None,
) -> RanksPlan:
    """Plan a recipe on ``ranks`` devices.

    Raises RecipeError if the recipe's layout does not have this number of ranks, UsageError for a wrong device or
    number.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"--ranks {ranks} is out of range", remedy=f"give 1 to {MAX_RANKS:,}")
    start = time.perf_counter()
    solve_layout(loaded.recipe, ranks)  # before anything is traced
    many = on_ranks(loaded, device, memory=memory, devices=devices)
    options = runnable(many, loaded, ranks)
    best, written = best_of(options), best_of(options_of(many, loaded.recipe, ranks))
    best = written if _alike(written, best) else best
    return RanksPlan(
        name=loaded.recipe.name,
        recipe=recipe,
        device=many.device,
        ranks=ranks,
        size=many.size,
        parameters=many.copies.weights.numel,
        written=written,
        best=best,
        others=tuple(runners_up(options, best)),
        notes=(*choice_notes(best, options, many.device), *_idle(best, many.size)),
        planned_s=time.perf_counter() - start,
    )


def on_ranks(
    loaded: Loaded, device: str | None, *, memory: str | None = None, devices: Path | None = None
) -> ManyRanks:
    """Trace the computation of ranks once for all layouts. Raises UsageError for an unknown device."""
    table = known_devices() if devices is None else load_devices(devices)
    return survey_ranks(loaded, named_device(device, dict(table), None if memory is None else parse_bytes(memory)))


def runnable(many: ManyRanks, loaded: Loaded, ranks: int) -> list[Placement]:
    """Return every layout on ``ranks`` ranks with which the engine can train the recipe."""
    degrees = [each for each in layouts_of(ranks, many) if is_trainable(loaded.recipe, each, many.shape)]
    return many.all(degrees, loaded.recipe.parallel.zero)


def _alike(one: Placement, other: Placement) -> bool:
    return (one.degrees, one.zero, one.policy, one.micro) == (other.degrees, other.zero, other.policy, other.micro)


def _idle(best: Placement, size: int) -> list[Note]:
    idle = best.degrees.data - size
    if idle <= 0:
        return []
    why = f"a step has {size:,} samples; give batch.size at least {best.degrees.data:,}"
    return [Note("samples", f"{idle:,} ranks have none", why)]
