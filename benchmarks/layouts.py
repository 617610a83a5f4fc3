"""The planner for many ranks: GPTs with 1.3, 7 and 70 G parameters on 8 to 4,096 H100, and published throughput.

    python -m benchmarks.layouts [--quick]

**Everything is calculated, nothing is measured**: memory from a trace under fake tensors, times from the roofline and
the links in the device table. For each model and number of ranks: the layout that the plan chooses among those that the
engine supports, its step time and MFU, the memory of a rank, and the fraction of a step that waits for communication.
The last lines compare with published throughput: GPTs on A100, D. Narayanan et al. 2021, arXiv:2104.04473, table 1, in
FLOP/s per GPU including those of activation checkpointing. The published layouts combine tensor and pipeline
parallelism, so the ratio compares two ways to train the same model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import about, arguments, figure
from trainwright.commands.plan import on_ranks, runnable
from trainwright.plan.many_ranks import ManyRanks, Placement, best_of
from trainwright.recipe import Loaded, load

RECIPE = Path(__file__).parent.parent / "recipes" / "llama-7b.yaml"
BATCH = 4096
"""Number of samples of 2,048 tokens in a step, for any number of ranks: 8.4 M tokens."""
RANKS = (8, 64, 512, 1024, 4096)
SHAPES = {  # layers, d_model, heads
    "1.3G": (24, 2048, 16),
    "7G": (32, 4096, 32),
    "70G": (80, 8192, 64),
}
PUBLISHED = {  # layers, d_model, heads, samples a step, GPUs, achieved FLOP/s a GPU
    "1.7G": (24, 2304, 24, 512, 32, 137e12),
    "3.6G": (30, 3072, 32, 512, 64, 138e12),
    "7.5G": (36, 4096, 32, 512, 128, 142e12),
    "18.4G": (40, 6144, 48, 1024, 256, 135e12),
}
AS_PUBLISHED = ("vocab_size=51200", "norm=layer", "positions=learned", "activation=gelu", "bias=true", "tied=true")


def recipe(layers: int, width: int, heads: int, size: int, more: Sequence[str] = ()) -> Loaded:
    shape = [f"layers={layers}", f"d_model={width}", f"heads={heads}", *more]
    return load(RECIPE, overrides=[*(f"model.args.{each}" for each in shape), f"batch.size={size}"], environ={})


def chosen(many: ManyRanks, loaded: Loaded, ranks: int) -> Placement:
    """Returns the layout that the plan chooses among those that the engine supports."""
    return best_of(runnable(many, loaded, ranks))


def main() -> None:
    options = arguments(__doc__)
    about("layouts")
    for name, shape in list(SHAPES.items())[: 1 if options.quick else None]:
        begin_s = time.process_time()
        loaded = recipe(*shape, BATCH)
        many = on_ranks(loaded, "h100-80gb")
        for ranks in RANKS[:1] if options.quick else RANKS:
            show(f"{name}_{ranks}", chosen(many, loaded, ranks))
        figure("layouts", f"{name}_planned", [time.process_time() - begin_s], unit="s", against="one core")
    for name, (layers, width, heads, size, ranks, flops) in list(PUBLISHED.items())[: 1 if options.quick else None]:
        loaded = recipe(layers, width, heads, size, AS_PUBLISHED)
        placed = chosen(on_ranks(loaded, "a100-80gb"), loaded, ranks)
        ours = placed.time.flops / placed.step_s
        against = f"{flops / 1e12:g} TFLOP/s on {ranks} A100, arXiv:2104.04473; here calculated, {placed.degrees}"
        figure("layouts", f"{name}_published", [ours / flops], unit="ratio", against=against)


def show(case: str, placed: Placement) -> None:
    what = f"calculated, {placed}" if placed.fits else f"calculated, does not fit: {placed}"
    figure("layouts", f"{case}_step", [placed.step_s], unit="s", against=what)
    figure("layouts", f"{case}_mfu", [placed.mfu], unit="share", against="peak rate of the device")
    figure("layouts", f"{case}_peak", [placed.peak_bytes / 2**20], unit="MiB", against="a rank")
    figure("layouts", f"{case}_waits", [placed.exposed_s / placed.step_s], unit="share", against="exchanges, of a step")


if __name__ == "__main__":
    main()
