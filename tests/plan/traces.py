"""Traces made by hand, small enough to follow."""

from __future__ import annotations

from trainwright.plan.call_trace import Kind, Moment, Phase, Trace, Work
from trainwright.plan.scale import Scaled

GIB = 1 << 30


def moment(phase: Phase, **held: float) -> Moment:
    """Returns a moment that holds these sizes, in GiB by kind."""
    sizes: dict[Kind, int] = {kind: round(size * GIB) for kind, size in held.items()}  # type: ignore[misc]
    return Moment(phase, 0, "blocks.0", "mm", sizes)


def trace(samples: int, *, state: float = 8.0, kept: float = 1.0, again: bool = False, flops: int = 10**12) -> Trace:
    """Weights of ``state`` GiB, half of it for gradients, twice for moments; ``kept`` GiB of activations per sample."""
    held = {"weights": state, "optimizer": 2 * state, "inputs": 0.01 * samples}
    grads, acts = state / 2, kept * samples
    moments = (
        moment("forward", **held, activations=acts),
        moment("backward", **held, activations=acts / 2, gradients=grads / 2),
        moment("backward", **held, gradients=grads),
        moment("update", **held, gradients=grads),
    )
    work = [
        Work("forward", "blocks.0", "mm", "bfloat16", 10, flops * samples, 10**8 * samples),
        Work("backward", "blocks.0", "mm", "bfloat16", 20, 2 * flops * samples, 2 * 10**8 * samples),
        Work("update", "", "_fused_adamw_", "float32", 1, 0, round(7 * state * GIB / 2)),
    ]
    if again:
        work.append(Work("checkpointing", "blocks.0", "mm", "bfloat16", 10, flops * samples, 10**8 * samples))
    return Trace("cuda", moments, {"blocks.0": round(acts * GIB)}, tuple(work))


def scaled(**how: object) -> Scaled:
    return Scaled(trace(2, **how), trace(4, **how), (2, 4))  # type: ignore[arg-type]
