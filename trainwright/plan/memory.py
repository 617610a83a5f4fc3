"""Memory of a run by arithmetic: what weights, gradients and optimizer state weigh."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.recipe import optimizer_row

BYTES = 4


def memory_bytes(
    optimizer: str,
    args: Mapping[str, object],
    *,
    parameters: int,
    trainable: int,
    activations: int,
    offloaded: bool = False,
) -> dict[str, int]:
    """Bytes by kind for one rank with fp32 weights. ``activations`` are those measured on one micro-batch.

    An ``offloaded`` optimizer keeps nothing on the device. An optimizer of the user's own counts as AdamW. Temporaries
    of kernels, the batch itself and the framework are left out.
    """
    state = 0 if offloaded else optimizer_row(optimizer).values_per_weight(args)
    return {
        "weights": parameters * BYTES,
        "gradients": trainable * BYTES,
        "optimizer": trainable * BYTES * state,
        "activations": activations,
    }
