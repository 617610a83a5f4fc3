"""``sweep``: trials of a recipe with varied settings, sampled by Optuna, each in an ordinary run folder."""

from trainwright.commands.sweep.control import run_sweep, sweep
from trainwright.commands.sweep.result import SweepResult
from trainwright.commands.sweep.spec import Sweep, is_sweep_file, over_of, read_sweep

__all__ = ["Sweep", "SweepResult", "is_sweep_file", "over_of", "read_sweep", "run_sweep", "sweep"]
