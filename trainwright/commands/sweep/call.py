"""``tw.sweep``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from trainwright.commands.sweep.control import run_sweep
from trainwright.commands.sweep.result import SweepResult
from trainwright.commands.sweep.spec import read_sweep


def sweep(
    what: Path | str,
    over: Mapping[str, object] | None = None,
    *,
    trials: int | None = None,
    sampler: Literal["grid", "random", "tpe"] | None = None,
    pruner: Literal["none", "median", "hyperband"] | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    seed: int | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    budget: str | None = None,
    usd_per_hour: float | None = None,
    name: str | None = None,
    folder: Path | str | None = None,
    settings: Mapping[str, object] | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Train a recipe with many settings, and rank the results.

    Each trial is a process and an ordinary run folder. The same call resumes a sweep that was killed.

    Args:
        what: A sweep file, the folder of a sweep, or a recipe.
        over: The varied recipe paths, each with a list of values, or a range such as ``"log:1e-4..1e-1"``,
            ``"0.0..0.5"`` and ``"int:2..8"``.
        trials: Number of trials. Default: all points of a grid, else 20.
        sampler: ``grid``, ``random`` or ``tpe``. Default: a grid if it has no more points than there are trials,
            else TPE.
        pruner: ``none``, or ``median`` or ``hyperband``, which stop trials that are worse than others at the same step.
        metric: ``loss`` (of the validation), ``train_loss``, or the name of a metric of the validation.
        mode: ``min`` or ``max``; required for a metric that is not a loss.
        seed: The seed of the sampler. The trials have the seed of the recipe.
        jobs: Number of concurrent trials. Default: as many as cores and memory allow.
        threads: CPU threads of each trial, 1 by default. The number changes the last bits of a result.
        budget: ``"20min"``, ``"24"`` trials, or ``"5USD"``.
        usd_per_hour: The price of this machine, for a budget in USD.
        name: The name of the sweep and of its folder.
        folder: The parent of the folder of the sweep. Default: ``runs``.
        settings: Settings of all trials, by path.
        quiet: Print nothing.

    Returns:
        The table, the best trial and its recipe.

    Raises:
        RecipeError: The recipe or the sweep is wrong. The error lists every problem.
        UsageError: The folder holds another sweep.

    Example:
        >>> result = tw.sweep("demo-digits", {"optimizer.lr": "log:1e-3..1"}, trials=8)  # doctest: +SKIP
        >>> result.best.params  # doctest: +SKIP
    """
    from trainwright.commands.sweep.space import setting_of

    found = read_sweep(
        Path(what),
        over=over,
        settings=[setting_of(path, value) for path, value in (settings or {}).items()],
        environ=os.environ,
        trials=trials,
        sampler=sampler,
        pruner=pruner,
        metric=metric,
        mode=mode,
        seed=seed,
        jobs=jobs,
        threads=threads,
        budget=budget,
        usd_per_hour=usd_per_hour,
        name=name,
        folder=None if folder is None else str(folder),
    )
    return run_sweep(found, say=(lambda line: None) if quiet else print)
