"""Prints docs/reference/catalog.md: ``python scripts/catalog.py > docs/reference/catalog.md``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from textwrap import dedent
from typing import Any

from trainwright import recipe
from trainwright.errors import install_remedy
from trainwright.optim.choose import accepted_args
from trainwright.plan.devices import Device, known_devices
from trainwright.plan.make import choose_precision
from trainwright.recipe.resolve import import_factory

HEAD = """# Built-in models, data, losses and optimizers

Every name that a recipe may say, from the rows of `trainwright/recipe/catalog.py` and `trainwright/plan/devices.yaml`;
`scripts/catalog.py` prints this page, and a test holds it equal. Instead of a model, dataset, loss, metric,
optimizer, schedule or observer of these a recipe may name one of its own as `package.module:callable`.

To add one: a row, its factory, a test, and this page printed again. The schema of recipes (`trainwright schema`), "did
you mean", the memory arithmetic of a plan, optimizer offload and the rules of a resume follow from the row.
"""
METRICS = (
    "[metrics](../how-to/metrics.md) explains the arguments; `options` are further ones of the class in torchmetrics."
)
STATE = "State per weight counts values in the dtype of the weight. An optimizer of the user's own counts as "
STATE += "adamw in a forecast; before a run the dry run measures it."

ALIASES = 'Short names of optimizers of the package pytorch_optimizer (`pip install "pytorch_optimizer>=3.5"`); '
ALIASES += "[optimizers](../how-to/optimizers.md) has the rules for any optimizer that is named by its package."


def table(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rows = [list(columns), ["---"] * len(list(columns)), *map(list, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def named(rows: Mapping[str, recipe.Row]) -> str:
    """Returns a table of all rows, then the docstring of each row with a table of its arguments."""
    listed = table(("name", "what it is"), ([f"`{row.name}`", row.doc] for row in rows.values()))
    return "\n\n".join([listed, *(described(row) for row in rows.values())])


def described(row: recipe.Row) -> str:
    factory = import_factory(row.factory)
    text, meanings = read(inspect.getdoc(factory) or "")
    rows = [[f"`{name}`", kind, default, meanings.get(name, "")] for name, kind, default in arguments(factory)]
    parts = [f"### `{row.name}`", text]
    parts += [table(("argument", "type", "default", "what it is"), rows)] if rows else ["No arguments."]
    return "\n\n".join(parts)


def arguments(factory: Callable[..., Any]) -> Iterator[tuple[str, str, str]]:
    """Yields name, type and default of each argument that a recipe may set, without those that the engine passes."""
    for name, each in inspect.signature(factory).parameters.items():
        if name in (
            "model",
            "batch",
            "chunked",
            "max_logits_bytes",
        ):  # ``chunked`` is set by the recipe key loss.chunked, the others by the engine and the plan
            continue
        stars = "**" if each.kind is each.VAR_KEYWORD else ""
        default = "" if stars else "required" if each.default is each.empty else f"`{shown(each.default)}`"
        yield stars + name, kind(str(each.annotation), sys.modules[factory.__module__]), default


def kind(annotation: str, module: object) -> str:
    """Returns the type of an argument in the terms of a recipe."""
    written = getattr(module, annotation, None)  # an alias such as Split
    text = str(written).replace("typing.", "") if written is not None else annotation
    if "Path" in text:
        return "path"
    text = re.sub(r"Literal\[(.*)\]", r"\1", text).replace(" | None", " or null").replace("'", "")
    return "any" if text == "object" else re.sub(r"Sequence\[(.*)\]", r"list of \1", text)


def shown(value: object) -> str:
    """Returns a value in the notation of recipes."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def read(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the text of a docstring before its arguments, and the meaning of each argument."""
    text, _, rest = docstring.partition("\nArgs:\n")
    block = re.match(r"((?: {4}.*\n?|\n(?= {4}))*)", rest)
    entries = re.split(r"\n(?=\S)", dedent(block[0] if block else "").strip())
    pairs = [entry.partition(": ") for entry in entries if entry]
    words = {name: " ".join(meaning.split()) for name, _, meaning in pairs}
    plain = re.sub(r"\s*Raises .*", "", text, flags=re.DOTALL)
    return code(plain.strip()), {name: code(meaning) for name, meaning in words.items()}


def code(text: str) -> str:
    """Returns a docstring as Markdown for a table cell: single backticks, escaped bars."""
    return text.replace("``", "`").replace("|", "\\|")


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
    args = ", ".join(name for name in inspect.signature(import_factory(row.factory)).parameters if name not in shared)
    return [f"`{row.name}`", row.doc, args]


def metric(row: recipe.Row) -> list[str]:
    return [f"`{row.name}`", row.doc, ", ".join(name for name, *_ in arguments(import_factory(row.factory)))]


def device(each: Device) -> list[str]:
    best, _ = choose_precision("auto", each.kind, each.precisions, {})
    memory, flops = f"{each.memory_bytes / 2**30:.1f} GiB", f"{each.flops[best] / 1e12:g} TFLOP/s in {best}"
    price = "" if each.price is None else f"${each.price:g}: {each.priced}"
    source = each.source.split(", http")[0]
    return [f"`{each.name}`", memory, f"{each.bandwidth / 1e12:.2f} TB/s", flops, price, source]


def page() -> str:
    optimizers = ("name", "what it is", "weight decay", "state per weight", "fused", "offload", "args")
    sinks = (
        [f"`{row.name}`", row.doc, f"`{install_remedy(row.package)}`" if row.package else "trainwright"]
        for row in recipe.SINKS.values()
    )
    return "\n\n".join(
        [
            HEAD.rstrip(),
            "## Optimizers",
            table(optimizers, map(optimizer, recipe.OPTIMIZERS.values())),
            STATE,
            ALIASES,
            table(
                ("name", "what it is", "stands for"),
                ([f"`{row.name}`", row.doc, f"`{row.factory}`"] for row in recipe.OPTIMIZER_ALIASES.values()),
            ),
            "## Schedules",
            table(("name", "what it is", "args"), map(schedule, recipe.SCHEDULES.values())),
            *("## Observers", named(recipe.OBSERVERS)),
            "## Sinks",
            table(("name", "what it is", "installed by"), sinks),
            *("## Models", named(recipe.MODELS), "## Datasets", named(recipe.DATASETS)),
            *("## Losses", named(recipe.LOSSES), "## Metrics", METRICS),
            table(("name", "what it is", "args"), map(metric, recipe.METRICS.values())),
            "## Devices that a plan may be made for",
            table(
                ("name", "memory", "bandwidth", "training arithmetic", "price of an hour", "source"),
                map(device, known_devices().values()),
            ),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
