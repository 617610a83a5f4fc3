"""Memory of a run by arithmetic: what weights, gradients and optimizer state weigh."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.recipe import optimizer_row

BYTES = 4
SHARE_OF_LOGITS = 0.5
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
    """Bytes by kind for one rank with fp32 weights: all that a step holds, if it held all at once.

    ``activations`` are those measured on one micro-batch. ``average`` is the size of the moving average of the weights,
    which counts as weights, and ``inputs`` that of the batch.

    Of ``shard`` ranks each holds one part of everything; with ``zero`` 1 and 2 the whole weights as well, with 1 the
    whole gradients. The weights of one block that are gathered while it computes are left out.

    An ``offloaded`` optimizer keeps nothing on the device. An optimizer of the user's own counts as AdamW. Temporaries
    of kernels and the framework are left out.
    """
    state = 0 if offloaded else optimizer_row(optimizer).values_per_weight(args)
    return {
        "weights": _held(parameters * BYTES, shard, whole=zero < 3) + average,
        "gradients": _held(trainable * BYTES, shard, whole=zero < 2),
        "optimizer": _held(round(trainable * BYTES * state), shard),
        "activations": activations,
    } | {kind: size for kind, size in (("buffers", buffers), ("inputs", inputs)) if size}


def _held(num_bytes: int, ranks: int, *, whole: bool = False) -> int:
    return -(-num_bytes // ranks) + (num_bytes if whole and ranks > 1 else 0)


def room_for_logits(usable_bytes: int, held_bytes: int) -> int:
    """Bytes of logits that fit beside ``held_bytes`` of weights, gradients and optimizer, and other activations."""
    return max(0, int(SHARE_OF_LOGITS * (usable_bytes - held_bytes)))
