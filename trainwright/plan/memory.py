"""Memory of a run by arithmetic: what weights, gradients and optimizer state weigh."""

from __future__ import annotations

from collections.abc import Mapping

# float32 values that each optimizer keeps for a trainable weight; Adafactor's factors are negligible.
STATE_PER_WEIGHT: Mapping[str, int] = {"sgd": 1, "adam": 2, "adamw": 2, "lamb": 2, "lars": 1, "muon": 1, "adafactor": 0}
BYTES = 4


def memory_bytes(
    optimizer: str, *, parameters: int, trainable: int, activations: int, offloaded: bool = False
) -> dict[str, int]:
    """By kind, for one rank in fp32 master weights. ``activations`` is measured on one micro-batch.

    What is ``offloaded`` is not on the device. An optimizer of the user's own is taken to keep two values a weight, as
    Adam does. Temporaries of kernels, the batch itself and the framework are not in it.
    """
    return {
        "weights": parameters * BYTES,
        "gradients": trainable * BYTES,
        "optimizer": 0 if offloaded else trainable * BYTES * STATE_PER_WEIGHT.get(optimizer, 2),
        "activations": activations,
    }
