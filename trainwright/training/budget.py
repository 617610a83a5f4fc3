"""Converts the length of a run from a cost, in US dollars or kilowatt-hours of the GPU, into time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from trainwright.assembly.assemble import at_recipe
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loop import Until
from trainwright.errors import UsageError
from trainwright.monitoring.nvml import Gpus
from trainwright.recipe import Duration, Loaded
from trainwright.recipe.duration import BUDGETS
from trainwright.runs.reader import UNUSED, Usage

READ_EVERY_S = 0.2
"""Seconds between two readings of the energy counter. The driver updates it about every 0.1 s."""


def within_budget(loaded: Loaded, price: float | None, watts: float | None, ranks: int, used: Usage = UNUSED) -> Loaded:
    """Return the recipe with a length in seconds instead of a cost; unchanged if it has no cost.

    Dollars pay for the time from the first step to the end of the run. Kilowatt-hours are converted with the power
    limit of the GPU, which gives the shortest possible time. The run itself ends by the measured energy.

    Args:
        loaded: The recipe.
        price: US dollars per hour of one device, None if unknown. A price in the recipe takes precedence.
        watts: The power limit of the device; None without a GPU that reports it.
        ranks: The number of devices.
        used: What earlier processes of this run have used. It counts against the cost.

    Raises:
        RecipeError: The price or the power is not known, or nothing is left.
    """
    until = loaded.recipe.until
    if until.unit not in BUDGETS:
        return loaded
    with at_recipe(loaded.source, "until"):
        if until.unit == "USD":
            price = loaded.recipe.price or price
            if price is None:
                raise UsageError("the price of this device is not known", remedy="write price: 2.5, in USD an hour")
            seconds = 3600 * until.value / (price * ranks)
            _require_rest(until, used.seconds * price * ranks / 3600)
            limited = replace(loaded, within_s=seconds - used.seconds if ranks == 1 else None)
        else:
            if watts is None:
                raise UsageError(
                    "this device does not report its power limit or energy",
                    remedy="write a length in steps, seconds or USD",
                )
            if ranks > 1:
                raise UsageError("kWh of several devices are not added up", remedy="write a length in seconds or USD")
            _require_rest(until, used.kwh)
            seconds = 3600 * 1000 * until.value / watts
            limited = loaded
    return replace(limited, cost=until, recipe=loaded.recipe.model_copy(update={"until": Duration(seconds, "s")}))


def _require_rest(until: Duration, used: float) -> None:
    if used >= until.value:
        raise UsageError(
            f"the run has used {used:.3g} {until.unit} before, of {until}",
            remedy=f"allow more in total: {Duration(round(2 * used, 3), until.unit)}",
        )


def for_energy(limit_kwh: float, used_kwh: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> Until:
    """Return the ``until`` of a run that ends after it has used ``limit_kwh``."""
    due_s, fraction = clock(), 0.0

    def until(_state: TrainState) -> float:
        nonlocal due_s, fraction
        if clock() >= due_s:
            due_s, fraction = clock() + READ_EVERY_S, max(fraction, used_kwh() / limit_kwh)
        return fraction

    return until


def energy_meter(indices: tuple[int, ...]) -> Callable[[], float]:
    """Return a function that returns the energy in kWh that the GPUs with these NVML indices have used since now."""
    gpus = Gpus(indices)
    return gpus.energy_kwh
