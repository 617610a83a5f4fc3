"""What a step of one's own costs in our engine: a GAN, two optimizers that take turns, against its loop by hand.

    python -m benchmarks.own_step [--rounds 9] [--first 64] [--steps 200] [--quick]

The plain loop shuffles tensors in memory and makes the turns, and nothing else. ``WIDTH_steps`` is the same step in
``tw.steps``, ``WIDTH_fit`` in ``tw.fit`` with everything at its default, of which the ``--first`` 64 steps, which the
doctor looks at more closely, are not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from benchmarks.figures import about, arguments, figure, interleaved, ratios

WIDTHS, BATCH, ROWS = (64, 512), 128, 2048


class Gan(nn.Module):
    """Two players of two hidden layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64)
        )
        self.critic = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )


class Game:
    """The players, their optimizers, and one turn of each."""

    def __init__(self, width: int) -> None:
        self.model = Gan(width)
        self.optimizers = [
            torch.optim.Adam(player.parameters(), lr=2e-4, fused=True)
            for player in (self.model.generator, self.model.critic)
        ]

    def turns(self, real: Tensor) -> Tensor:
        """Returns the loss of the critic."""
        for_generator, for_critic = self.optimizers
        fake = self.model.generator(torch.randn(len(real), 32))
        loss = F.softplus(-self.model.critic(real)).mean() + F.softplus(self.model.critic(fake.detach())).mean()
        for_critic.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for_critic.step()
        for_generator.zero_grad()
        F.softplus(-self.model.critic(fake)).mean().backward()  # type: ignore[no-untyped-call]
        for_generator.step()
        return loss

    def step(self, state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        (real,) = batch.data
        return self.turns(real)


def plain(width: int, first: int, steps: int) -> float:
    """Seconds of a step."""
    game, data, done = Game(width), torch.randn(ROWS, 64), 0
    begin_s = 0.0
    while True:
        for rows in torch.randperm(ROWS).split(BATCH):
            if done == first:
                begin_s = time.perf_counter()
            if done == first + steps:
                return (time.perf_counter() - begin_s) / steps
            game.turns(data[rows])
            done += 1


def in_steps(width: int, first: int, steps: int) -> float:
    game = Game(width)
    batches = tw.StepBatches(torch.utils.data.TensorDataset(torch.randn(ROWS, 64)), tw.Loading(BATCH, BATCH))
    state = tw.TrainState(game.model, tw.ChainedOptimizer(game.optimizers))
    times_s = [
        time.perf_counter()
        for _ in tw.steps(state, batches, tw.make_own_step(game.step), until=tw.for_steps(first + steps))
    ]
    return (times_s[-1] - times_s[first - 1]) / steps


def in_fit(width: int, first: int, steps: int) -> float:
    game, times_s = Game(width), list[float]()
    with tempfile.TemporaryDirectory(prefix="own-step-") as folder:
        tw.fit(
            game.model,
            (torch.randn(ROWS, 64),),
            advance=game.step,
            optimizer=game.optimizers,
            batch=BATCH,
            until=f"{first + steps}steps",
            observers=[lambda result, state: times_s.append(time.perf_counter())],
            settings={"folder": folder},
            quiet=True,
        )
    return (times_s[-1] - times_s[first - 1]) / steps


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    about("own_step")
    for width in WIDTHS[:1] if options.quick else WIDTHS:
        seen = interleaved(
            {
                "plain": lambda width=width: plain(width, options.first, options.steps),  # type: ignore[misc]
                "steps": lambda width=width: in_steps(width, options.first, options.steps),  # type: ignore[misc]
                "fit": lambda width=width: in_fit(width, options.first, options.steps),  # type: ignore[misc]
            },
            options.rounds,
            uncounted=0 if options.quick else 1,
        )
        figure("own_step", f"{width}_plain", [1e6 * s for s in seen["plain"]], unit="us", against="absolute")
        for name in ("steps", "fit"):
            figure("own_step", f"{width}_{name}", ratios(seen[name], seen["plain"]), unit="ratio", against="plain loop")


if __name__ == "__main__":
    main(arguments(__doc__, rounds=(9, 1), first=(64, 2), steps=(200, 4)))
