"""Precision: which numbers the forward pass computes with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from trainwright.checkpoint.scaler import LossScaler, NoScaler
from trainwright.errors import require_choice

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "mxfp8": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """fp32 and tf32 compute as they are; bf16 and fp16 run the forward pass and the loss under autocast.

    fp8 and mxfp8 are bf16 here: the linear layers themselves cast their operands, see ``build.fp8``.

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


class MatmulMode(NamedTuple):
    """Process-wide: whether float32 matrix products and convolutions on a GPU may use TF32 tensor cores."""

    matmul: str
    convolutions: bool

    @classmethod
    def read(cls) -> MatmulMode:
        """Return what the process is set to."""
        return cls(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)

    @classmethod
    def asked(cls, precision: PrecisionName | Literal["auto"] | None) -> MatmulMode:
        """Return the mode for the precision of a recipe: tf32 allows TF32, fp32 forbids it, others leave it."""
        if precision not in ("fp32", "tf32"):
            return cls.read()
        return cls("high" if precision == "tf32" else "highest", precision == "tf32")

    def set(self) -> None:
        """Set the process to it."""
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.convolutions


FP32 = Precision("fp32")
