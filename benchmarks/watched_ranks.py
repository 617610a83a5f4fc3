"""Two watched gloo processes on a busy machine must not time out, and must have the bits of the unwatched run.

    python -m benchmarks.watched_ranks [--runs 24] [--spinning 2]

Each run is one program of ``zoo/ranks.py`` with one seed, first unwatched, then watched on both ranks. ``--spinning``
other processes keep the CPUs busy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.watched_ranks: run by its path it hides the package zoo")

from benchmarks.pairs import Spinning, run_pair

PROGRAMS = ("HX1", "HX2", "HX3", "HX4", "HX6", "HX7", "HX8", "X15")
"""Programs that must reach their end."""


def main() -> None:
    """Prints a line for each run and one for all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--spinning", type=int, default=2)
    options = parser.parse_args()
    seeds = list(range(-(-options.runs // len(PROGRAMS))))
    with tempfile.TemporaryDirectory() as folder, Spinning(options.spinning):
        ask = {"names": list(PROGRAMS[: options.runs]), "seeds": seeds, "folder": folder, "compare": True}
        told = run_pair("zoo.ranks_host", ask, Path(folder))
    pairs = list(zip(*told, strict=True))
    for pair in pairs:
        print(json.dumps({"id": pair[0]["id"], "seed": pair[0]["seed"], **outcome(list(pair))}))
    found = [outcome(list(pair)) for pair in pairs]
    same, ended = (sum(bool(each[name]) for each in found) for name in ("same_bits", "ended"))
    print(json.dumps({"runs": len(found), "same_bits": same, "ended": ended}))
    if same < len(found) or ended < len(found):
        sys.exit(1)


def outcome(pair: list[dict[str, object]]) -> dict[str, object]:
    """Return whether both ranks ended without an error, and whether their weights equal those of unwatched ranks."""
    return {
        "ended": all(not each["error"] and not each["failures"] for each in pair),
        "same_bits": all(each["bits"] == each["bits_alone"] for each in pair),
        "seconds": [each["seconds"] for each in pair],
    }


if __name__ == "__main__":
    main()
