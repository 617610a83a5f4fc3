"""Precision: which numbers the forward pass computes with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from trainwright.errors import require_choice
from trainwright.state.scaler import LossScaler, NoScaler

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """fp32 and tf32 compute as they are; bf16 and fp16 run the forward pass and the loss under autocast.

    Weights, gradients and optimizer state stay in fp32 in every mode. ``caches``: autocast keeps its copy of a weight
    to the end of a forward pass, for it may be used twice. Where ranks hold parts of weights, the copies are whole.
    """

    name: PrecisionName
    device_type: str = "cpu"
    caches: bool = True

    def __post_init__(self) -> None:
        require_choice("the precision", self.name, get_args(PrecisionName))

    def autocast(self) -> AbstractContextManager[object]:
        """A context for one forward pass and its loss; never for a whole loop, whose cache would go stale."""
        dtype = _AUTOCAST.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(self.device_type, dtype, cache_enabled=self.caches)

    def scaler(self, device: torch.device) -> LossScaler | NoScaler:
        """fp16 needs a loss scale; bf16 has fp32's range and needs none."""
        return LossScaler(device) if self.name == "fp16" else NoScaler()

    def set_matmul_mode(self) -> None:
        """Process-wide: tf32 lets float32 matmuls and convolutions use tensor cores, all else forbids it."""
        tf32 = self.name == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32


FP32 = Precision("fp32")
