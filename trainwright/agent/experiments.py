"""Tools for agents that run code: plan a recipe, check it, and replay recorded steps.

Each tool runs a command in a separate process with limits on time and memory (``process.py``).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.agent.process import ProcessLimits, run_command
from trainwright.agent.tools import RunTools, finding_of
from trainwright.errors import UsageError
from trainwright.recipe.section import is_reference
from trainwright.recipe.yaml_core import UnreadableError, read
from trainwright.report.diagnosis import diagnosis_of


class Experiments:
    """The tools. Commands run in the folder of the user's code."""

    def __init__(self, tools: RunTools, limits: ProcessLimits) -> None:
        self._tools, self._limits = tools, limits
        self._lock = threading.Lock()

    def plan_recipe(
        self, recipe: str, settings: list[str] | None = None, device: str = "", ranks: int = 0
    ) -> dict[str, object]:
        """Predict memory and time of a recipe (a YAML file in the code folder, or a built-in name). Runs the code of
        the recipe. settings: PATH=VALUE. device, ranks: such as h100-80gb and 8. Default: this machine.
        """
        on = [*([f"--device={device}"] if device else []), *([f"--ranks={ranks}"] if ranks else [])]
        output = self._run("plan", self._require_recipe(recipe), *on, *self._set_arguments(settings))
        fits = output.get("fits")
        return {
            "outcome": "" if fits is None else "it fits" if fits else "it does not fit",
            "result": {name: value for name, value in output.items() if name != "methods"},
        }

    def check_recipe(self, recipe: str, settings: list[str] | None = None) -> dict[str, object]:
        """Check a recipe, or MODULE:FUNCTION that returns (model, data, loss, optimizer), for mistakes before a run.
        Runs its code for a few steps.
        """
        output = self._run("check", self._require_recipe(recipe), *self._set_arguments(settings))
        verdicts = output.get("verdicts", [])
        bad = [each for each in verdicts if each.get("word") != "ok"]
        known: dict[object, str] = {True: "it trains", False: "it would not train"}
        outcome = known.get(output.get("trains"), "it is not known if it trains")
        return {
            "outcome": f"{outcome}; {len(bad)} of {len(verdicts)} verdicts are not ok",
            "result": {"verdicts": bad},
        }

    def replay_step(self, run: str, step: int = 0, model: str = "") -> dict[str, object]:
        """Replay a recorded step bit for bit and examine it. step 0: the step of the first finding. model:
        FILE.py:FUNCTION that builds the model; required for a watched loop.
        """
        output = self._replay(run, step, model)
        findings = [f"{each['code']} (step {each['step']}): {each['symptom']}" for each in output.get("findings", [])]
        tried = [
            f"{each['remedy']}: {each['result']}"
            for found in output.get("findings", [])
            for each in found.get("tried", [])
        ]
        result = {"same_bits": output.get("same_bits"), "error": output.get("error"), "notes": output.get("notes")}
        return {"outcome": str(output.get("outcome", "")), "result": {**result, "findings": findings, "tried": tried}}

    def run_experiment(self, run: str, change: str, step: int = 0, model: str = "") -> dict[str, object]:
        """Replay a recorded step with one change and compare: lr=FACTOR, fp32, fp64, eval, train, without=ID,ID
        (samples), clip=NORM, op=NAME (that torch function in float64). step, model: as in replay_step.
        """
        if change.startswith("remedy"):
            raise UsageError("run_experiment cannot try the remedy of a finding", remedy="call try_remedy")
        return self._try(run, step, model, change)

    def try_remedy(self, run: str, code: str = "", model: str = "") -> dict[str, object]:
        """Try the remedy of a finding (default: the first) on its recorded step, before any code is changed."""
        found = finding_of(run, diagnosis_of(self._tools.folder(run)), code)
        return self._try(run, found.step, model, f"remedy={found.code}")

    def _try(self, run: str, step: int, model: str, change: str) -> dict[str, object]:
        output = self._replay(run, step, model, "--try", change)
        outcome = (output.get("changed") or {}).get("outcome", "")
        return {"outcome": outcome, "result": {"replay": output.get("outcome")}}

    def _replay(self, run: str, step: int, model: str, *more: str) -> Mapping[str, Any]:
        folder = self._tools.folder(run)
        step = step or finding_of(run, diagnosis_of(folder)).step
        chosen = ["--model", self._require_inside(model)] if model else []
        return self._run("replay", str(folder.path.resolve()), "--step", str(step), *chosen, *more)

    def _require_inside(self, name: str) -> str:
        """Return ``name``. Raises UsageError if its path, with links resolved, is outside of the code folder."""
        path = Path(name.rpartition(":")[0] or name)
        is_option = name.startswith("-") or "\0" in name or len(name) > 300
        root = self._tools.code.resolve()
        if is_option or path.is_absolute() or ".." in path.parts or not (root / path).resolve().is_relative_to(root):
            raise UsageError(
                f"{name[:80]!r} is not in the code folder",
                remedy="name a file inside it; paths with .. and links that lead outside are refused",
            )
        return name

    def _require_recipe(self, recipe: str) -> str:
        """Return ``recipe``. Raises UsageError if it, or its MODULE, is outside of the code folder or in a run.

        The code of a run folder is not trusted. Only replays run it, and they need permission.
        """
        self._require_inside(recipe)
        module, colon, _ = recipe.rpartition(":")
        if colon:
            self._require_module(module)
        elif self._tools.is_of_run(self._tools.code / recipe):
            raise UsageError(
                f"{recipe[:80]!r} belongs to a run", remedy="copy the recipe to your code, and read it there"
            )
        return recipe

    def _require_module(self, module: str) -> None:
        root = self._tools.code.resolve()
        top = module.partition(".")[0]
        path = (root / module.replace(".", "/")).resolve()
        is_there = any((root / name).exists() for name in (f"{top}.py", top)) if top.isidentifier() else False
        if not is_there or not path.is_relative_to(root) or self._tools.is_of_run(path):
            raise UsageError(
                f"{module[:80]!r} is no module of the code folder",
                remedy="name one below it; what another package or a run has belongs into a recipe that you have read",
            )

    def _set_arguments(self, settings: Sequence[str] | None) -> list[str]:
        """Return the options of settings.

        Raises UsageError for a callable that is neither in the code folder nor in torch.nn or torch.optim.
        """
        for each in settings or ():
            for text in _texts(_value_of(each.partition("=")[2])):
                module, colon, name = text.partition(":")
                if colon and is_reference(text) and not (_OF_TORCH.fullmatch(module) and name.isidentifier()):
                    self._require_module(module)
        return [word for each in settings or () for word in ("--set", each)]

    def _run(self, *arguments: str) -> Mapping[str, Any]:
        """Run one command at a time, because the limits apply to each command alone."""
        if not self._lock.acquire(timeout=self._limits.seconds):
            raise UsageError("another plan, check or replay is running", remedy="call this again when it has ended")
        try:
            return run_command(arguments, self._tools.code, self._limits)
        finally:
            self._lock.release()


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
