"""Each recipe in the box, killed and resumed: the same bits, in each precision, with and without worker processes?

    python benchmarks/verify_recipes.py [--quick] [--steps 6] [--only gpt-tiny.yaml]

One JSON line for each combination: recipe, precision, workers before and after, equal, seconds, and what differs. It
ends with 1 if anything does. Recipes are taken in the small forms of tests/test_runs.py. ``--quick`` is one
combination of each recipe.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

from trainwright.demo import recipe_folder
from trainwright.errors import TrainwrightError
from trainwright.verify import Trial, verify_resume

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from test_runs import SMALL  # noqa: E402

PRECISIONS = ("fp32", "bf16", "fp16")
WORKERS = ((0, 0), (2, 3))


def verified(name: str, precision: str, workers: tuple[int, int], steps: int) -> bool:
    """Prints the line of one combination."""
    settings = ("evaluation.batch=4", *SMALL[name], f"precision={precision}")
    line = {"recipe": name, "precision": precision, "workers": workers, "steps": steps}
    try:
        proof = verify_resume(Trial(recipe_folder() / name, steps, *workers, settings))
    except TrainwrightError as error:
        print(json.dumps({**line, "equal": None, "error": str(error)}), flush=True)
        return False
    differs = {} if proof.equal else {"lines": proof.lines()}
    print(json.dumps({**line, "equal": proof.equal, "seconds": round(proof.seconds, 1), **differs}), flush=True)
    return proof.equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one combination of each recipe")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=list(SMALL), action="append", help="repeatable")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ways = list(itertools.product(PRECISIONS, WORKERS))[: 1 if given.quick else None]
    told = [verified(name, *way, given.steps) for name in given.only or SMALL for way in ways]
    sys.exit(0 if all(told) else 1)


if __name__ == "__main__":
    main()
