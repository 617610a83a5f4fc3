"""Precision: the number formats of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from trainwright.checkpoint.scaler import LossScaler, NoScaler
from trainwright.errors import require_choice

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "mxfp8": torch.bfloat16}
NO_AUTOCAST = nullcontext()


@dataclass(frozen=True)
class Precision:
    """Precision of the forward pass and the loss.

    fp32 and tf32 run without autocast; bf16 and fp16 run under autocast. fp8 and mxfp8 use bf16 autocast: the linear
    layers cast their operands themselves, see ``assembly.linear_layers``. Weights, gradients and optimizer state keep
    their dtype (fp32 for most models) in every mode.

    Attributes:
        name: The mode.
        device_type: Device type of autocast.
        caches: Autocast keeps its copy of a weight until the end of a forward pass, because the weight may be used
            twice. The copies are full weights even if ranks hold parts.
    """

    name: PrecisionName
    device_type: str = "cpu"
    caches: bool = True

    def __post_init__(self) -> None:
        require_choice("the precision", self.name, get_args(PrecisionName))

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context for one forward pass and its loss. Not for a full loop: its cache would become stale."""
        dtype = _AUTOCAST.get(self.name)
        return NO_AUTOCAST if dtype is None else torch.autocast(self.device_type, dtype, cache_enabled=self.caches)

    def scaler(self, device: torch.device) -> LossScaler | NoScaler:
        """Return a loss scaler for fp16. bf16 has the range of fp32 and needs none."""
        return LossScaler(device) if self.name == "fp16" else NoScaler()


class MatmulMode(NamedTuple):
    """Process-wide permission to use TF32 tensor cores for float32 matrix products and convolutions on a GPU."""

    matmul: str
    convolutions: bool

    @classmethod
    def read(cls) -> MatmulMode:
        """Return the current mode of the process."""
        return cls(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)

    @classmethod
    def for_precision(cls, precision: PrecisionName | Literal["auto"] | None) -> MatmulMode:
        """Return the mode for the precision of a recipe: tf32 allows TF32, fp32 forbids it, others leave it."""
        if precision not in ("fp32", "tf32"):
            return cls.read()
        return cls("high" if precision == "tf32" else "highest", precision == "tf32")

    def set(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.convolutions


FP32 = Precision("fp32")
