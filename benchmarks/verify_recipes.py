"""Verifies that each built-in recipe, killed and resumed, has the same bits, in each precision and with workers or not.

    python -m benchmarks.verify_recipes [--quick] [--steps 6] [--only gpt-tiny.yaml]

Prints one JSON line for each combination: recipe, precision, workers before and after, equal, seconds, and the
differences, or the reason why it cannot run (equal: null). The exit code is 1 unless all are equal. Recipes have the
small sizes of the tests. ``--quick`` runs one combination of each recipe.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys

import torch

from tests.training.small_recipes import PRECISIONS, SMALL, WORKERS, small_trial
from trainwright.commands.verify.resume import verify_resume
from trainwright.errors import TrainwrightError


def verified(name: str, precision: str, workers: tuple[int, int], steps: int) -> bool:
    """Verifies one combination and prints its line. Returns True if it is equal."""
    line = {"recipe": name, "precision": precision, "workers": workers, "steps": steps}
    try:
        proof = verify_resume(small_trial(name, precision, workers, steps))
    except TrainwrightError as error:
        print(json.dumps({**line, "equal": None, "why": str(error)}), flush=True)
        return False
    differs = {} if proof.equal else {"why": proof.lines()}
    print(json.dumps({**line, "equal": proof.equal, "seconds": round(proof.seconds, 1), **differs}), flush=True)
    return proof.equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one combination of each recipe")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=list(SMALL), action="append", help="repeatable")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ways = list(itertools.product(PRECISIONS, WORKERS))[: 1 if options.quick else None]
    tried = [
        (name, *way)
        for name, way in itertools.product(options.only or SMALL, ways)
        if torch.cuda.is_available() or (name, way[0]) != ("lstm-text.yaml", "fp16")  # oneDNN has no such LSTM
    ]
    unequal = [each for each in tried if not verified(*each, options.steps)]
    sys.exit(1 if unequal else 0)


if __name__ == "__main__":
    main()
