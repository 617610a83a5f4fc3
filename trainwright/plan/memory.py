"""Memory of a run by arithmetic: weights, gradients, optimizer state and activations."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.recipe import optimizer_row

BYTES_PER_VALUE = 4
LOGITS_MEMORY_FRACTION = 0.5
"""The fraction of the memory left by weights, gradients and optimizer that the logits of a language model may take."""


def memory_bytes(
    optimizer: str,
    args: Mapping[str, object],
    *,
    parameters: int,
    trainable: int,
    activations: int,
    average: int = 0,
    buffers: int = 0,
    inputs: int = 0,
    offloaded: bool = False,
    shard: int = 1,
    zero: int = 3,
) -> dict[str, int]:
    """Return bytes by kind for one rank with fp32 weights: what a step would hold if it held everything at once.

    ``activations`` are the bytes measured on one micro-batch. ``average`` is the size of the moving average of the
    weights, which counts as weights, and ``inputs`` the size of the batch.

    Each of ``shard`` ranks holds one part of weights, gradients and optimizer state; with ``zero`` 1 and 2 also the
    full weights, with 1 also the full gradients. The weights of one block that are gathered while it computes are not
    counted.

    An ``offloaded`` optimizer keeps nothing on the device. A custom optimizer counts as AdamW. Temporaries of kernels
    and of the framework are not counted.
    """
    state = 0 if offloaded else optimizer_row(optimizer).values_per_weight(args)
    return {
        "weights": _rank_bytes(parameters * BYTES_PER_VALUE, shard, whole=zero < 3) + average,
        "gradients": _rank_bytes(trainable * BYTES_PER_VALUE, shard, whole=zero < 2),
        "optimizer": _rank_bytes(round(trainable * BYTES_PER_VALUE * state), shard),
        "activations": activations,
    } | {kind: size for kind, size in (("buffers", buffers), ("inputs", inputs)) if size}


def _rank_bytes(num_bytes: int, ranks: int, *, whole: bool = False) -> int:
    return -(-num_bytes // ranks) + (num_bytes if whole and ranks > 1 else 0)


def room_for_logits(usable_bytes: int, held_bytes: int) -> int:
    """Return the bytes of logits that fit in addition to ``held_bytes`` of state and to other activations."""
    return max(0, int(LOGITS_MEMORY_FRACTION * (usable_bytes - held_bytes)))
