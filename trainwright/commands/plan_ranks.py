"""``plan RECIPE --ranks N``: predicts memory, communication and time on many ranks, in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import UsageError
from trainwright.plan.degrees import AXES
from trainwright.plan.devices import Device, known_devices, load_devices
from trainwright.plan.explain import human_seconds
from trainwright.plan.make import Note
from trainwright.plan.many_ranks import (
    SUPPORTED_AXES,
    ManyRanks,
    Placement,
    best_of,
    choice_notes,
    is_trainable,
    layouts_of,
    runners_up,
)
from trainwright.plan.parallel import solve_layout
from trainwright.plan.trace.local_device import named_device
from trainwright.plan.trace.many_ranks import survey_ranks
from trainwright.plan.trace.spread import options_of
from trainwright.recipe import Loaded
from trainwright.recipe.byte_size import parse_bytes
from trainwright.report.forecast import usable_line
from trainwright.report.many_ranks import (
    machine_line,
    memory_by_stage,
    placement_lines,
    runner_up_lines,
    traffic_lines,
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
        """0 if the recipe as written fits, else 3."""
        return 0 if self.written.fits else 3

    def lines(self) -> list[str]:
        """Return the text output."""
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
        axes = {axis: getattr(best.degrees, axis) for axis in SUPPORTED_AXES}
        found = [f"parallel.{axis}={size}" for axis, size in axes.items() if size > 1]
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
        """Return the object that ``--json`` prints."""
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
    degrees = [
        each for each in layouts_of(ranks, many, SUPPORTED_AXES) if is_trainable(loaded.recipe, each, many.shape)
    ]
    return many.all(degrees, (loaded.recipe.parallel.zero,))


def _alike(one: Placement, other: Placement) -> bool:
    return (one.degrees, one.zero, one.policy, one.micro) == (other.degrees, other.zero, other.policy, other.micro)


def _idle(best: Placement, size: int) -> list[Note]:
    idle = best.degrees.data - size
    if idle <= 0:
        return []
    why = f"a step has {size:,} samples; give batch.size at least {best.degrees.data:,}"
    return [Note("samples", f"{idle:,} ranks have none", why)]
