"""``sweep``: trials of a recipe with other settings, by Optuna, each an ordinary run folder."""

from trainwright.verbs.sweep.call import sweep
from trainwright.verbs.sweep.control import run_one, run_sweep
from trainwright.verbs.sweep.result import SweepResult
from trainwright.verbs.sweep.spec import Sweep, is_sweep_file, over_of, read_sweep

__all__ = ["Sweep", "SweepResult", "is_sweep_file", "over_of", "read_sweep", "run_one", "run_sweep", "sweep"]
