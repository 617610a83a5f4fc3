"""Prints docs/catalog.md from the rows of the catalog: ``python scripts/catalog.py > docs/catalog.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping

from trainwright import recipe
from trainwright.build.optim.choose import accepted_args
from trainwright.build.resolve import imported
from trainwright.plan.devices import Device, known_devices

HEAD = """# What ships in the box

Every name that a recipe may say, from the rows of `trainwright/recipe/catalog.py` and `trainwright/plan/devices.yaml`;
`scripts/catalog.py` prints this page, and a test holds it equal. Instead of a model, dataset, loss, metric,
optimizer, schedule or observer of these a recipe may name one of its own as `package.module:callable`.

To add one: a row, its factory, a test, and this page printed again. The schema of recipes (`trainwright schema`), "did
you mean", the memory arithmetic of a plan, optimizer offload and the rules of a resume follow from the row.
"""
METRICS = "See [metrics.md](metrics.md)."
STATE = "State per weight counts values in the dtype of the weight. An optimizer of the user's own counts as "
STATE += "adamw in a forecast; before a run the dry run measures it."


def table(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rows = [list(columns), ["---"] * len(list(columns)), *map(list, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def named(rows: Mapping[str, recipe.Row]) -> str:
    return table(("name", "what it is"), ([f"`{row.name}`", row.doc] for row in rows.values()))


def optimizer(row: recipe.OptimizerRow) -> list[str]:
    state = str(row.state_per_weight) + "".join(f"; {row.state_per_weight + 1} with {name}" for name in row.adds_state)
    if row.needs_for_state:
        state += f"; 0 {'without' if row.keeps_state else 'unless args have'} {row.needs_for_state}"
    decay = "decoupled" if row.decoupled else "L2"
    offload = f"no: {row.why_not_offloaded}" if row.why_not_offloaded else "yes"
    args = "those of torch" if row.factory.startswith("torch.") else ", ".join(accepted_args(row.name))
    return [f"`{row.name}`", row.doc, decay, state, "yes" if row.fused else "no", offload, args]


def schedule(row: recipe.Row) -> list[str]:
    shared = ("total", "warmup", "floor")
    args = ", ".join(name for name in inspect.signature(imported(row.factory)).parameters if name not in shared)
    return [f"`{row.name}`", row.doc, args]


def device(each: Device) -> list[str]:
    best = each.training_precision
    memory, flops = f"{each.memory_bytes / 2**30:.1f} GiB", f"{each.flops[best] / 1e12:g} TFLOP/s in {best}"
    return [f"`{each.name}`", memory, f"{each.bandwidth / 1e12:.2f} TB/s", flops, each.source.split(", http")[0]]


def page() -> str:
    optimizers = ("name", "what it is", "weight decay", "state per weight", "fused", "offload", "args")
    sinks = (
        [f"`{row.name}`", row.doc, f"`trainwright[{row.extra}]`" if row.extra else "trainwright"]
        for row in recipe.SINKS.values()
    )
    return "\n\n".join(
        [
            HEAD.rstrip(),
            "## Optimizers",
            table(optimizers, map(optimizer, recipe.OPTIMIZERS.values())),
            STATE,
            "## Schedules",
            table(("name", "what it is", "args"), map(schedule, recipe.SCHEDULES.values())),
            *("## Observers", named(recipe.OBSERVERS)),
            "## Sinks",
            table(("name", "what it is", "installed by"), sinks),
            *("## Models", named(recipe.MODELS), "## Datasets", named(recipe.DATASETS)),
            *("## Losses", named(recipe.LOSSES), "## Metrics", METRICS, named(recipe.METRICS)),
            "## Devices that a plan may be made for",
            table(
                ("name", "memory", "bandwidth", "training arithmetic", "source"), map(device, known_devices().values())
            ),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
