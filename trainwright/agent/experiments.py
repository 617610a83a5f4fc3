"""Tools for agents that run code: a plan and a check of a recipe, and replays of recorded steps.

Each runs a command in a process of its own, bounded in time and memory (``process.py``).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.agent.process import ProcessLimits, run_command
from trainwright.agent.tools import RunTools
from trainwright.errors import UsageError
from trainwright.recipe.section import is_reference
from trainwright.recipe.yaml_core import UnreadableError, read
from trainwright.report.diagnosis import diagnosis_of
from trainwright.report.evidence import finding_in


class Experiments:
    """Runs commands in the folder of the user's code."""

    def __init__(self, tools: RunTools, limits: ProcessLimits) -> None:
        self._tools, self._limits = tools, limits
        self._one = threading.Lock()

    def plan_recipe(self, recipe: str, settings: list[str] | None = None) -> dict[str, object]:
        """Predict memory and time of a recipe (a YAML file in the code folder, or a built-in name). Runs the code that
        it names. settings: PATH=VALUE."""
        done = self._run("plan", self._own(recipe), *self._set(settings))
        return {"outcome": _plan_in_words(done), "result": _without(done, "frontier", "devices", "methods", "timeline")}

    def check_recipe(self, recipe: str, settings: list[str] | None = None) -> dict[str, object]:
        """Check if a recipe, or MODULE:FUNCTION that returns (model, data, loss, optimizer), would train.
        Runs its code for a few steps."""
        done = self._run("check", self._own(recipe), *self._set(settings))
        verdicts = done.get("verdicts", [])
        bad = [each for each in verdicts if each.get("word") != "ok"]
        known: dict[object, str] = {True: "it trains", False: "it would not train"}
        said = known.get(done.get("trains"), "it is not known if it trains")
        return {
            "outcome": f"{said}; {len(bad)} of {len(verdicts)} verdicts are not ok",
            "result": {"verdicts": bad},
        }

    def replay_step(self, run: str, step: int = 0, model: str = "") -> dict[str, object]:
        """Replay a recorded step bit for bit and examine it. step 0: the one of the first finding. model:
        FILE.py:FUNCTION that builds the model, for a watched loop."""
        done = self._replay(run, step, model)
        findings = [f"{each['code']} (step {each['step']}): {each['symptom']}" for each in done.get("findings", [])]
        tried = [
            f"{each['remedy']}: {each['result']}"
            for found in done.get("findings", [])
            for each in found.get("tried", [])
        ]
        result = {"same_bits": done.get("same_bits"), "error": done.get("error"), "notes": done.get("notes")}
        return {"outcome": str(done.get("outcome", "")), "result": {**result, "findings": findings, "tried": tried}}

    def run_experiment(self, run: str, change: str, step: int = 0, model: str = "") -> dict[str, object]:
        """Replay a recorded step with one change and compare: lr=FACTOR, fp32, fp64, eval, train, without=ID,ID
        (samples), clip=NORM, op=NAME (that torch function in float64). step, model: as in replay_step."""
        if change.startswith("remedy"):
            raise UsageError("run_experiment tries no remedy", remedy="call try_remedy")
        done = self._replay(run, step, model, "--try", change)
        return {"outcome": (done.get("changed") or {}).get("outcome", ""), "result": {"replay": done.get("outcome")}}

    def try_remedy(self, run: str, code: str = "", model: str = "") -> dict[str, object]:
        """Try the remedy of a finding (default: the first) on its recorded step, before any code is changed."""
        found = finding_in(diagnosis_of(self._tools.folder(run)), code or None)
        done = self._replay(run, found.step, model, "--try", f"remedy={found.code}")
        return {"outcome": (done.get("changed") or {}).get("outcome", ""), "result": {"replay": done.get("outcome")}}

    def _replay(self, run: str, step: int, model: str, *more: str) -> Mapping[str, Any]:
        folder = self._tools.folder(run)
        step = step or finding_in(diagnosis_of(folder), None).step
        chosen = ["--model", self._inside(model)] if model else []
        return self._run("replay", str(folder.path.resolve()), "--step", str(step), *chosen, *more)

    def _inside(self, name: str) -> str:
        """Return a name that leads out of the code folder neither by itself nor by a link. Raises UsageError."""
        path = Path(name.rpartition(":")[0] or name)
        is_option = name.startswith("-") or "\0" in name or len(name) > 300
        root = self._tools.code.resolve()
        if is_option or path.is_absolute() or ".." in path.parts or not (root / path).resolve().is_relative_to(root):
            raise UsageError(
                f"{name[:80]!r} is not in the code folder",
                remedy="name a file below it, without .. and links out of it",
            )
        return name

    def _own(self, recipe: str) -> str:
        """Return a recipe or MODULE:FUNCTION that is of the code folder, and of no run. Raises UsageError.

        What a run folder names or holds may come from anybody; only replays, which need permission, run it.
        """
        self._inside(recipe)
        module, colon, _ = recipe.rpartition(":")
        if colon:
            self._require_own_module(module)
        elif self._tools.is_of_run(self._tools.code / recipe):
            raise UsageError(
                f"{recipe[:80]!r} belongs to a run", remedy="copy the recipe to your code, and read it there"
            )
        return recipe

    def _require_own_module(self, module: str) -> None:
        root = self._tools.code.resolve()
        top = module.partition(".")[0]
        path = (root / module.replace(".", "/")).resolve()
        is_there = any((root / name).exists() for name in (f"{top}.py", top)) if top.isidentifier() else False
        if not is_there or not path.is_relative_to(root) or self._tools.is_of_run(path):
            raise UsageError(
                f"{module[:80]!r} is no module of the code folder",
                remedy="name one below it; what another package or a run has belongs into a recipe that you have read",
            )

    def _set(self, settings: Sequence[str] | None) -> list[str]:
        """Return the options of settings. Raises UsageError if one names a callable that is not of the code folder."""
        for each in settings or ():
            for text in _texts(_value_of(each.partition("=")[2])):
                module, colon, name = text.partition(":")
                if colon and is_reference(text) and not (_OF_TORCH.fullmatch(module) and name.isidentifier()):
                    self._require_own_module(module)
        return [word for each in settings or () for word in ("--set", each)]

    def _run(self, *words: str) -> Mapping[str, Any]:
        """Run a command; one at a time, because the limits are those of each."""
        if not self._one.acquire(timeout=self._limits.seconds):
            raise UsageError("another plan, check or replay is running", remedy="call this again when it has ended")
        try:
            return run_command(words, self._tools.code, self._limits)
        finally:
            self._one.release()


_OF_TORCH = re.compile(r"torch\.(nn|optim)")
"""Modules whose classes a setting may name."""


def _value_of(text: str) -> object:
    try:
        return read(text, "--set").value
    except UnreadableError:
        return text  # the command reports it


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)


def _without(done: Mapping[str, Any], *names: str) -> dict[str, object]:
    return {name: value for name, value in done.items() if name not in names}


def _plan_in_words(done: Mapping[str, Any]) -> str:
    fits = done.get("fits")
    return "" if fits is None else "it fits" if fits else "it does not fit"
