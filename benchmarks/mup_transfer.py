"""The best learning rate of a narrow and of a wide GPT, in standard parametrization and in muP.

    python -m benchmarks.mup_transfer [--quick] [--narrow 64] [--wide 256] [--steps 120] [--rates 7]

Both widths train on the same batches with each of ``--rates`` learning rates: 5e-4, 1e-3, 2e-3, ... The loss is the
mean over the last sixth of the steps. ``_lr`` is the learning rate with the lowest loss, ``_loss`` that loss.
``_kept_loss`` is the loss of the wide model with the best learning rate of the narrow one: the result of tuning a
narrow model.
"""

from __future__ import annotations

from itertools import islice

import torch

from benchmarks import figures
from trainwright.engine.step import make_step
from trainwright.optim.clip import make_clip
from trainwright.recipe import load
from trainwright.recipe.load import builtin_recipes
from trainwright.training.prepare import prepare

BENCH = "mup_transfer"
LOWEST_LR = 5e-4


def trained(init: str, width: int, base: int, lr: float, steps: int) -> float:
    """Returns the final training loss; infinity if it is not finite."""
    shape = f"block_size: 64, layers: 2, heads: 4, d_model: {width}, init: {init}, base_width: {base}"
    settings = [f"model.args={{{shape}}}"]
    settings += [f"optimizer.lr={lr}", f"until={steps}steps", f"schedule.warmup={steps // 6}steps", "batch.size=8"]
    job = prepare(load(builtin_recipes() / "gpt-tiny.yaml", overrides=[*settings, "precision=fp32", "data.val=null"]))
    clip = job.recipe.optimizer.clip
    advance = make_step(job.parts.loss, schedule=job.built.schedule, clip=make_clip(clip.by, clip.at))
    losses = torch.tensor([float(advance(job.state, batch).loss) for batch in islice(job.batches, steps)])
    last = losses[-max(1, steps // 6) :].mean()
    return float(last) if last.isfinite() else float("inf")


def main() -> None:
    defaults = {"narrow": (64, 32), "wide": (256, 64), "steps": (120, 6), "rates": (7, 2)}
    options = figures.arguments(__doc__, **{name: (float(a), float(b)) for name, (a, b) in defaults.items()})
    torch.set_num_threads(options.threads)
    narrow, wide, steps = int(options.narrow), int(options.wide), int(options.steps)
    rates = [LOWEST_LR * 2**power for power in range(int(options.rates))]
    figures.about(BENCH)
    for init in ("gpt2", "mup"):
        best = dict[int, float]()
        for width in (narrow, wide):
            losses = {lr: trained(init, width, narrow, lr, steps) for lr in rates}
            for lr, loss in losses.items():
                figures.figure(BENCH, f"{init}_{width}_at_{lr:g}", [loss], unit="nats", against="absolute")
            best[width] = min(losses, key=lambda lr: losses[lr])
            figures.figure(BENCH, f"{init}_{width}_lr", [best[width]], unit="learning rate", against="absolute")
            figures.figure(BENCH, f"{init}_{width}_loss", [losses[best[width]]], unit="nats", against="absolute")
        kept = losses[best[narrow]]
        at = f"width {wide} at the best rate of {narrow}"
        figures.figure(BENCH, f"{init}_kept_loss", [kept], unit="nats", against=at)


if __name__ == "__main__":
    main()
