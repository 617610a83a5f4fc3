"""``compare-optimizers RECIPE NAMES``: a learning rate for each optimizer by a range test, then runs of one length."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.checkpoint.rng import preserved_rng
from trainwright.commands.lr_range import run_lr_range
from trainwright.errors import UsageError
from trainwright.recipe import OPTIMIZER_ALIASES, Loaded, load
from trainwright.runs.printing import in_columns
from trainwright.training.run import process_settings
from trainwright.trials.trial import Trial, run_trial


@dataclass(frozen=True)
class ComparedOptimizer:
    """One row. ``lr`` is the learning rate of the run; ``from_range`` is True if the range test found it."""

    name: str
    lr: float
    from_range: bool
    trial: Trial

    @property
    def loss(self) -> float:
        """The validation loss at the end; without one, the last training loss that was logged."""
        if self.trial.evaluations:
            return self.trial.val_loss
        return self.trial.losses[-1][1] if self.trial.losses else math.nan

    def to_json(self) -> dict[str, object]:
        return {
            "optimizer": self.name,
            "lr": self.lr,
            "lr_from_range_test": self.from_range,
            "loss": self.loss,
            "step_s": self.trial.step_s,
            "seconds": self.trial.seconds,
            "peak_bytes": self.trial.peak_bytes,
            "ended": self.trial.ended,
            "reason": self.trial.reason,
            "findings": [each.code for each in self.trial.findings],
            "run": str(self.trial.folder),
        }


@dataclass(frozen=True)
class OptimizerComparison:
    """The rows, ordered by loss. ``loss_name`` is the name of that loss."""

    folder: Path
    rows: tuple[ComparedOptimizer, ...]
    loss_name: str

    @property
    def exit_code(self) -> int:
        return int(any(not each.trial.steps or each.trial.ended == "failed" for each in self.rows))

    def lines(self) -> list[str]:
        head = ("optimizer", "lr", self.loss_name, "s/step", "seconds", "memory", "")
        body = [
            (
                each.name,
                f"{each.lr:.3g}{'' if each.from_range else ' (default)'}",
                f"{each.loss:.4g}",
                f"{each.trial.step_s:.3g}",
                f"{each.trial.seconds:.3g}",
                f"{each.trial.peak_bytes / 2**30:.2f} GiB",
                _remarks(each.trial),
            )
            for each in self.rows
        ]
        return [*in_columns([head, *body]), str(self.folder)]

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "loss": self.loss_name, "rows": [each.to_json() for each in self.rows]}


def compare_optimizers(
    recipe: str | Path,
    names: Sequence[str],
    *,
    settings: Sequence[str] = (),
    range_steps: int = 80,
    threads: int = 1,
    say: Callable[[str], None] = lambda _line: None,
) -> OptimizerComparison:
    """Train a recipe once with each optimizer, at a learning rate that a range test finds for it.

    Each run has the length, data and seed of the recipe, and its base run folder. Runs are sequential, so that their
    times are comparable. The arguments of the recipe's optimizer apply to that optimizer only. Groups, clipping,
    schedule, and a weight decay that the recipe states apply to all. The learning rate is the suggestion of the range
    test (Smith 2017), or the default of the optimizer if the loss never fell.

    Args:
        recipe: The path of a recipe, or the name of a built-in one.
        names: Optimizers: short names, or ``package.module:callable``.
        settings: Overrides of the recipe, as ``path=value``: ``["until=500steps"]``.
        range_steps: Optimizer steps of each range test.
        threads: CPU threads of each run.
        say: Receives each line on progress.

    Returns:
        One row per optimizer, ordered by loss.

    Raises:
        UsageError: An optimizer cannot be used. Raised before anything is trained.
        RecipeError: As UsageError, for a problem of the recipe.
    """
    if len(set(names)) < max(2, len(names)):
        raise UsageError(
            f"{len(names)} optimizers are named, {len(set(names))} of them different",
            remedy="name two or more, each once: adamw muon schedulefree",
        )
    base = load(recipe, overrides=settings)
    chosen = {name: [*settings, *_settings_of(name, base)] for name in names}
    loaded = {name: load(recipe, overrides=each) for name, each in chosen.items()}
    folder, rows = _new_folder(base), list[ComparedOptimizer]()
    rates = {name: _rate(name, each, range_steps, say) for name, each in loaded.items()}
    for name, (lr, is_found) in rates.items():
        say(f"{name}: trains at lr {lr:.3g}")
        plain = name.replace(":", ".")
        run = [*chosen[name], f"optimizer.lr={lr!r}"]
        trial = run_trial(Path(recipe), run, folder / plain, threads=threads)
        rows.append(ComparedOptimizer(name, lr, is_found, trial))
        say(f"{name}: loss {rows[-1].loss:.4g}, {trial.ended}{f': {trial.reason}' if trial.reason else ''}")
    rows.sort(key=lambda each: (math.isnan(each.loss), each.loss))
    has_val = any(each.trial.evaluations for each in rows)
    return OptimizerComparison(folder, tuple(rows), "val loss" if has_val else "loss")


def _settings_of(name: str, base: Loaded) -> list[str]:
    optimizer = base.recipe.optimizer
    if name in (optimizer.use, *(alias for alias, row in OPTIMIZER_ALIASES.items() if row.factory == optimizer.use)):
        return []
    kept = ["optimizer.weight_decay"] if "optimizer.weight_decay" in base.stated else []
    decay = json.dumps(optimizer.weight_decay) if kept else "null"
    return [
        f"optimizer.use={json.dumps(name)}",
        "optimizer.args={}",
        "optimizer.lr=null",
        f"optimizer.weight_decay={decay}",
    ]


def _rate(name: str, loaded: Loaded, steps: int, say: Callable[[str], None]) -> tuple[float, bool]:
    """Return the learning rate of the range test, and True if it found one."""
    with preserved_rng(), process_settings():
        found, default = run_lr_range(loaded, steps=steps, lowest=1e-6, highest=10.0)
    suggested = "" if found.suggestion else ": the loss never fell by 1 %"
    lr = found.suggestion or default
    say(f"{name}: the range test suggests {'none' if suggested else f'{lr:.3g}'}{suggested}")
    return float(f"{lr:.3g}"), not suggested


def _new_folder(base: Loaded) -> Path:
    names = (f"{base.recipe.name}-optimizers{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
    return next(path for name in names if not (path := Path(base.recipe.folder) / name).exists())


def _remarks(trial: Trial) -> str:
    if trial.ended not in ("finished", "data_exhausted"):
        return f"{trial.ended}: {trial.reason.splitlines()[0]}" if trial.reason else trial.ended
    return ", ".join(dict.fromkeys(each.code for each in trial.findings))
