"""The doctor's scores for faults of several ranks: watched programs with two gloo processes.

    python -m benchmarks.rank_zoo [--apart] [--only X01,HX1] [--seeds 2] [--json]

The programs are those of ``zoo/ranks.py``, with ``--apart`` those of ``zoo/ranks_apart.py``.

recall: the right code is among the first three alarms of a rank. guilty: for a fault on one rank, that rank and no
other is named. For healthy runs: the number of runs with an alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.rank_zoo: run by its path it hides the package zoo")

import zoo.ranks_apart  # noqa: F401  registers all programs
from benchmarks.pairs import run_pair
from zoo.ranks_host import RANK_ENTRIES, score


def main() -> None:
    """Prints a line for each run, and one with the scores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = (
        options.only.split(",")
        if options.only
        else sorted(each for each in RANK_ENTRIES if is_apart(each) == options.apart)
    )
    with tempfile.TemporaryDirectory() as folder:
        ask = {"names": names, "seeds": list(range(options.seeds)), "folder": folder}
        told = run_pair("zoo.ranks_host", ask, Path(folder))
    scores = [score(list(pair)) for pair in zip(*told, strict=True)]
    for each in scores:
        print(json.dumps(each) if options.json else _line(each))
    print(json.dumps(marks(scores)))


def is_apart(name: str) -> bool:
    """Return True for the programs of ``zoo/ranks_apart.py``, group Y."""
    return name.removeprefix("H").startswith("Y")


def marks(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the recall over the faults, the faulty ranks that were named, and the alarms of healthy runs."""
    faults = [each for each in scores if RANK_ENTRIES[each["id"]].labels]
    healthy = [each for each in scores if not RANK_ENTRIES[each["id"]].labels]
    guilty = [each["guilty"] for each in faults if each["guilty"] is not None]
    places = [each["place"] for each in faults]
    return {
        "faults": len(faults),
        "recall": round(
            sum(each["place"] is not None and each["place"] < 3 for each in faults) / max(1, len(faults)), 3
        ),
        "first": round(places.count(0) / max(1, len(places)), 3),
        "guilty": f"{sum(guilty)} of {len(guilty)}",
        "healthy": len(healthy),
        "healthy_with_alarm": sorted({each["id"] for each in healthy if any(each["alarms"])}),
        "failures": sorted({failure for each in scores for failure in each["failures"]}),
    }


def _line(each: dict[str, Any]) -> str:
    place = "-" if each["place"] is None else f"#{each['place'] + 1}"
    return f"{each['id']:5} seed {each['seed']} {place:3} guilty {each['guilty']} {each['seconds']} s {each['alarms']}"


if __name__ == "__main__":
    main()
