"""The cost of a user's objects in ``tw.fit``, compared with a plain loop that has the same objects.

    python -m benchmarks.own_objects [--rounds 5] [--steps 600] [--tasks gpt,mlp] [--quick]

``several``   AdamW for the matrices and SGD for the other parameters, both stepped in each step
``schedule``  torch's OneCycleLR, stepped after each step
``metrics``   two metrics of torchmetrics on the training batches, computed and reset every ten steps, as the log does

``tw.fit`` has neither doctor nor checkpoints; it logs every ten steps. Each run is a process; the sides alternate.
``TASK_CASE`` is the median step time of ``tw.fit`` divided by that of the plain loop.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from benchmarks.figures import about, figure, ratios
from benchmarks.processes import python
from benchmarks.step_overhead_variants import CLIP_AT, FIRST, LR, Clock, Task, make_task

CASES = ("several", "schedule", "metrics")
EVERY = 10
QUIET = {"log.doctor": False, "checkpoint.every": None, "checkpoint.at_least_every": None}


def optimizers(model: nn.Module, case: str) -> list[Optimizer]:
    if case != "several":
        return [AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [AdamW(matrices, lr=LR, fused=True), SGD(rest, lr=LR, momentum=0.9, fused=True)]


def schedulers(made: list[Optimizer], case: str, steps: int) -> list[LRScheduler]:
    return [OneCycleLR(each, max_lr=LR, total_steps=steps + 1) for each in made] if case == "schedule" else []


def metrics(task: Task, case: str) -> dict[str, object]:
    if case != "metrics":
        return {}
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    classes = 10 if task.name == "mlp" else 103
    return {"f1": MulticlassF1Score(classes), "accuracy": MulticlassAccuracy(classes)}


def flat(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.detach().flatten(0, -2), target.flatten()


class Flat:
    """Updates a metric with the flattened tokens of all sequences."""

    def __init__(self, metric: object) -> None:
        self.metric = metric

    def update(self, outputs: Any, targets: Any) -> None:
        self.metric.update(*flat(outputs, targets))  # type: ignore[attr-defined]

    def compute(self) -> object:
        return self.metric.compute()  # type: ignore[attr-defined]

    def reset(self) -> None:
        self.metric.reset()  # type: ignore[attr-defined]


def by_hand(task: Task, clock: Clock, case: str) -> None:
    model = task.make_model()
    made = optimizers(model, case)
    schedules, measured, batches = schedulers(made, case, task.steps), metrics(task, case), task.batches()
    for step in range(task.steps):
        x, y = next(batches)
        for each in made:
            each.zero_grad()
        output = model(x)
        task.loss(output, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
        for taken in (*made, *schedules):
            taken.step()  # type: ignore[attr-defined]
        for metric in measured.values():
            metric.update(*flat(output, y))  # type: ignore[attr-defined]
            if (step + 1) % EVERY == 0:
                float(metric.compute())  # type: ignore[attr-defined]
                metric.reset()  # type: ignore[attr-defined]
        clock()


def ours(task: Task, clock: Clock, case: str) -> None:
    import trainwright as tw

    model = task.make_model()
    made = optimizers(model, case)
    schedules = schedulers(made, case, task.steps)
    tw.fit(
        model,
        task.make_data(),
        task.loss,
        steps=task.steps,
        batch=task.batch_size,
        optimizer=made,
        schedule=schedules or None,
        clip=CLIP_AT,
        metrics={name: Flat(each) for name, each in metrics(task, case).items()},
        settings=QUIET,
        observers=[clock],
        quiet=True,
    )


def run(request: dict[str, object]) -> float:
    """Returns the median time of a step after the first FIRST steps."""
    torch.manual_seed(0)
    torch.set_num_threads(int(str(request["threads"])))
    task = make_task(str(request["task"]), int(str(request["steps"])))
    clock = Clock(task.steps, "cpu")
    (ours if request["side"] == "ours" else by_hand)(task, clock, str(request["case"]))
    times = clock.times_s
    first = min(FIRST, len(times) // 2)
    return statistics.median(after - before for before, after in zip(times[first:], times[first + 1 :]))


def in_a_process(request: dict[str, object], quick: bool) -> float:
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "OMP_NUM_THREADS": str(request["threads"]), "PYTHONPATH": path}
    words = ["-W", "ignore", "-m", "benchmarks.own_objects", json.dumps(request)]
    with tempfile.TemporaryDirectory(prefix="objects-") as folder:
        printed = python(words, cwd=Path(folder), env=environ, forks=quick)
    return float(printed.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=0, help="default 5, with --quick 1")
    parser.add_argument(
        "--steps", type=int, default=0, help="of the MLP; default 2400, with --quick 12; of the GPT a 12th"
    )
    parser.add_argument("--tasks", default="gpt,mlp")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--threads", type=int, default=2, help="threads of torch, on both sides")
    parser.add_argument("--quick", action="store_true", help="a functional test: its figures mean little")
    options = parser.parse_args()
    rounds, steps = options.rounds or (1 if options.quick else 5), options.steps or (12 if options.quick else 2400)
    about("own_objects")
    for name in options.tasks.split(","):
        for case in options.cases.split(","):
            seen: dict[str, list[float]] = {"hand": [], "ours": []}
            for number in range(rounds):
                for side in ("hand", "ours") if number % 2 else ("ours", "hand"):
                    count = steps if name == "mlp" or options.quick else steps // 12
                    request = {"task": name, "case": case, "side": side, "steps": count, "threads": options.threads}
                    seen[side].append(in_a_process(request, options.quick))
            figure(
                "own_objects",
                f"{name}_{case}",
                ratios(seen["ours"], seen["hand"]),
                unit="ratio",
                against="loop by hand",
            )
            figure(
                "own_objects", f"{name}_{case}_step", [1e6 * s for s in seen["hand"]], unit="us", against="loop by hand"
            )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        print(run(json.loads(sys.argv[1])))
    else:
        main()
