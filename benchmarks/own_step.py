"""The cost of a user's step in the engine: a GAN with two alternating optimizers, compared with a plain loop.

    python -m benchmarks.own_step [--rounds 5] [--widths 64,512] [--first 64] [--steps 400] [--threads 1] [--quick]

The plain loop only shuffles tensors in memory and updates both players. ``WIDTH_steps`` is the same step in
``tw.steps``, ``WIDTH_fit`` in ``tw.fit`` with its defaults. The ``--first`` 64 steps, which the doctor examines more
often, are not counted. ``..._cpu`` is the same in CPU time of the training thread, which other load affects less. With
several threads of torch, neither is meaningful on a busy machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from benchmarks.figures import about, arguments, figure, ratios

BATCH, ROWS = 128, 2048
Times = list[tuple[float, float]]


class Gan(nn.Module):
    """A generator and a critic with two hidden layers each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64)
        )
        self.critic = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )


class Game:
    """The two players and their optimizers. A step updates the critic, then the generator."""

    def __init__(self, width: int) -> None:
        self.model = Gan(width)
        self.optimizers = [
            torch.optim.Adam(player.parameters(), lr=2e-4, fused=True)
            for player in (self.model.generator, self.model.critic)
        ]

    def turns(self, real: Tensor) -> Tensor:
        """Updates both players. Returns the loss of the critic."""
        for_generator, for_critic = self.optimizers
        fake = self.model.generator(torch.randn(len(real), 32))
        loss = F.softplus(-self.model.critic(real)).mean() + F.softplus(self.model.critic(fake.detach())).mean()
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        F.softplus(-self.model.critic(fake)).mean().backward()
        for_generator.step()
        return loss

    def step(self, state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        (real,) = batch.data
        return self.turns(real)


def now_s() -> tuple[float, float]:
    """Returns wall time and CPU time of this thread."""
    return time.perf_counter(), time.thread_time()


def plain(width: int, count: int) -> Times:
    """Trains in the plain loop. Returns the times after each step."""
    game, data, times_s = Game(width), torch.randn(ROWS, 64), Times()
    while len(times_s) < count:
        for rows in torch.randperm(ROWS).split(BATCH):
            game.turns(data[rows])
            times_s.append(now_s())
    return times_s[:count]


def in_steps(width: int, count: int) -> Times:
    game = Game(width)
    batches = tw.StepBatches(torch.utils.data.TensorDataset(torch.randn(ROWS, 64)), tw.Loading(BATCH, BATCH))
    state = tw.TrainState(game.model, tw.ChainedOptimizer(game.optimizers))
    return [now_s() for _ in tw.steps(state, batches, tw.make_own_step(game.step), until=tw.for_steps(count))]


def in_fit(width: int, count: int) -> Times:
    game, times_s = Game(width), Times()
    with tempfile.TemporaryDirectory(prefix="own-step-") as folder:
        tw.fit(
            game.model,
            (torch.randn(ROWS, 64),),
            advance=game.step,
            optimizer=game.optimizers,
            batch=BATCH,
            until=f"{count}steps",
            observers=[lambda result, state: times_s.append(now_s())],
            settings={"folder": folder},
            quiet=True,
        )
    return times_s


WAYS: dict[str, Callable[[int, int], Times]] = {"plain": plain, "steps": in_steps, "fit": in_fit}


def step_s(times_s: Times, first: int) -> tuple[float, float]:
    """Returns the mean wall time and CPU time of a step after the first ``first`` steps."""
    (wall, cpu), (last_wall, last_cpu) = times_s[first - 1], times_s[-1]
    number = len(times_s) - first
    return (last_wall - wall) / number, (last_cpu - cpu) / number


def measure(width: int, options: argparse.Namespace) -> None:
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(options.rounds):
        names = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
        for name in names:
            seen[name].append(step_s(WAYS[name](width, options.first + options.steps), options.first))
    for at, kind in enumerate(("", "_cpu")):
        of = {name: [each[at] for each in values] for name, values in seen.items()}
        figure("own_step", f"{width}_plain{kind}", [1e6 * s for s in of["plain"]], unit="us", against="absolute")
        for name in ("steps", "fit"):
            values = ratios(of[name], of["plain"])
            figure("own_step", f"{width}_{name}{kind}", values, unit="ratio", against="plain loop")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    about("own_step")
    for width in options.widths.split(","):
        measure(int(width), options)


if __name__ == "__main__":
    main(arguments(__doc__, rounds=(5, 1), widths=("64,512", "64"), first=(64, 2), steps=(400, 4)))
