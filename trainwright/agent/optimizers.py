"""The optimizers of a watched run: measured groups from the log, construction from the user's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.calls import CallsFacts, OptimizerFacts, kinds
from trainwright.doctor.facts.weights import UpdateFacts
from trainwright.report.source_lines import construction_of
from trainwright.runs.records import Watched

MAX_OPTIMIZERS = 8


def optimizer_lines(run: RunContext) -> dict[int, dict[str, str]]:
    """Return for each optimizer the first recorded lines of its calls of ``step`` and ``zero_grad``.

    A step records its events and their lines in the same order. Steps where a line is missing are left out.
    """
    found: dict[int, dict[str, str]] = {}
    for step in run.steps:
        recorded = step.values.get("lines") or ()
        for kind in ("step", "zero_grad") if recorded else ():
            numbers = _numbers(step, kind)
            lines = [str(line) for each, line in recorded if each == kind]
            for number, line in zip(numbers, lines) if len(numbers) == len(lines) else ():
                if 0 <= number < MAX_OPTIMIZERS:  # -1 is a module
                    found.setdefault(number, {}).setdefault(kind, line)
    return found


def _numbers(step: Watched, kind: str) -> list[int]:
    """Return the numbers of the optimizers of the calls of a kind, in order."""
    values = [value["optimizer"] if isinstance(value, dict) else value for _, value in kinds(step, kind)]
    return [each if isinstance(each, int) else -1 for each in values]


def optimizers_of(run: RunContext, code: Path, began_s: float | None) -> list[dict[str, object]]:
    """Return what is known about each optimizer: construction, line of its step, parameter groups."""
    facts = [each for _, each in run.every(CallsFacts)]
    decays = _weight_decays(run, facts[-1].optimizers) if facts else {}
    lines = optimizer_lines(run)
    made: list[dict[str, object]] = []
    for number in sorted({*lines, *range(len(facts[-1].optimizers) if facts else 0)})[:MAX_OPTIMIZERS]:
        called = lines.get(number, {})
        sources = [called[each] for each in ("step", "zero_grad") if each in called]
        built = next((each for line in sources if (each := construction_of(line, code, began_s=began_s))), None)
        known = {"optimizer": number, **{f"{kind}_line": line for kind, line in called.items()}}
        if built is not None:
            known |= {"class": built.kind, "variable": built.variable, "made_line": built.line, "made_by": built.call}
            known |= {"note": built.note} if built.note else {}
        made.append({**known, "groups": _groups(number, facts, decays.get(number, []))})
    return made


def optimizer_in_words(optimizer: Mapping[str, object]) -> str:
    """Return the class, the variable and the lines of an optimizer as one line."""
    names = " ".join(str(optimizer[each]) for each in ("class", "variable") if optimizer.get(each))
    lines = [
        f"{word} {optimizer[key]}"
        for word, key in (("made", "made_line"), ("step", "step_line"), ("zero_grad", "zero_grad_line"))
        if optimizer.get(key)
    ]
    parts = [*([names] if names else []), *lines, *([str(optimizer["note"])] if optimizer.get("note") else [])]
    return f"optimizer {optimizer['optimizer']}: {', '.join(parts)}"


def _groups(number: int, facts: list[CallsFacts], decays: list[float]) -> list[dict[str, object]]:
    """Return the groups of an optimizer: number of tensors, first and last learning rate, weight decay."""
    examined = [each.optimizers[number].groups for each in facts if number < len(each.optimizers)]
    groups: list[dict[str, object]] = []
    for index, last in enumerate(examined[-1] if examined else ()):
        first = examined[0][index] if index < len(examined[0]) else last
        group: dict[str, object] = {"tensors": last.parameters, "lr": first.lr}
        group |= {"lr_at_end": last.lr} if last.lr != first.lr else {}
        group |= {"weight_decay": decays[index]} if index < len(decays) else {}
        groups.append(group)
    return groups


def _weight_decays(run: RunContext, optimizers: Sequence[OptimizerFacts]) -> dict[int, list[float]]:
    """Return the weight decays of the groups of each optimizer. A replayed update lists them in the order of steps."""
    orders = {each.step: [n for n in _numbers(each, "step") if 0 <= n < len(optimizers)] for each in run.steps}
    found: dict[int, list[float]] = {}
    for at, update in run.every(UpdateFacts):
        rest, order = list(update.weight_decay), orders.get(at, [])
        if len(rest) == sum(len(optimizers[number].groups) for number in order):
            for number in order:
                num_groups = len(optimizers[number].groups)
                found.setdefault(number, rest[:num_groups])
                rest = rest[num_groups:]
    return found
