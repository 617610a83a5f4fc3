"""Compares five trainers in three situations: a stop and resume, a NaN in the data, and an incomplete last step.

    python -m benchmarks.peers [--only resume,nonfinite,window] [--trainers ours,lightning,accelerate,hf,plain]

resume: the run is stopped after step 17 of 40, within an epoch, and resumed by a new process. The figure is the number
of the 23 later losses that differ from those of an undisturbed run. The data are augmented at random, and the model has
dropout. nonfinite: one sample of 160 has a NaN, in steps 12 and 32. The figure is the fraction of weights that are
finite at the end. window: 20 samples in micro-batches of 4, with 4 micro-batches per step, so that the second step has
only one. The figure is the distance of the weights from those of a loop with full batches, relative to their change.

Each run is a process that uses the public calls in the trainer's documentation with their defaults. ``plain`` is a loop
that saves the state_dict of model and optimizer, as in PyTorch's tutorial. Prints one JSON line for each figure, with
null if the trainer is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.peers: run by its path it hides its neighbours")

from benchmarks.figures import about, figure
from benchmarks.peers_runs import CASES, STEPS, STOP, TRAINERS
from benchmarks.processes import python

LIBRARIES = {"lightning": "lightning", "accelerate": "accelerate", "hf": "transformers"}
"""Required library by trainer."""
Outcome = dict[str, list[float]]


def main() -> None:
    """Prints a figure for each case and trainer."""
    options = _arguments()
    about("peers")
    for case in options.only.split(","):
        for trainer in options.trainers.split(","):
            with tempfile.TemporaryDirectory() as folder:
                values = MEASURES[case](trainer, Path(folder))
            unit = {"resume": "losses", "nonfinite": "share", "window": "share"}[case]
            against = {"resume": f"{STEPS - STOP} after the stop", "nonfinite": "1", "window": "whole batches"}[case]
            figure("peers", f"{case}_{trainer}", values, unit=unit, against=against)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    return parser.parse_args()


def resumed(trainer: str, folder: Path) -> list[float]:
    """Returns the number of losses after the stop that differ."""
    whole = _run(trainer, "resume", folder / "whole", "whole")
    _run(trainer, "resume", folder / "stopped", "stopped")
    rest = _run(trainer, "resume", folder / "stopped", "resumed")
    if whole is None or rest is None:
        return []
    expected, seen = whole["losses"][STOP:], rest["losses"]
    missing = abs(len(expected) - len(seen))
    return [float(missing + sum(one != other for one, other in zip(expected, seen)))]


def nonfinite(trainer: str, folder: Path) -> list[float]:
    """Returns the fraction of weights that are finite after the run."""
    seen = _run(trainer, "nonfinite", folder, "whole")
    return [] if seen is None else seen["finite"]


def window(trainer: str, folder: Path, *, forks: bool = False) -> list[float]:
    """Returns the distance of the weights from those of the plain loop with full batches, relative to their change."""
    seen = _run(trainer, "window", folder / "run", "whole", forks=forks)
    plain = _run("plain", "window", folder / "plain", "whole", forks=forks)
    if seen is None or plain is None:
        return []
    apart = sum((a - b) ** 2 for a, b in zip(seen["weights"], plain["weights"], strict=True)) ** 0.5
    moved = sum((a - b) ** 2 for a, b in zip(plain["weights"], plain["initial"], strict=True)) ** 0.5
    return [apart / moved]


MEASURES = {"resume": resumed, "nonfinite": nonfinite, "window": window}


def _run(trainer: str, case: str, folder: Path, part: str, *, forks: bool = False) -> Outcome | None:
    """Return the output of a run; None if its library is not installed. ``forks``: see ``processes.Started``."""
    if trainer in LIBRARIES and find_spec(LIBRARIES[trainer]) is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    command = ["-m", "benchmarks.peers_runs", trainer, case, part, str(folder.resolve())]
    printed = python(command, cwd=Path.cwd(), env=os.environ, forks=forks)
    seen: Outcome = json.loads(printed.splitlines()[-1])
    return seen


if __name__ == "__main__":
    main()
