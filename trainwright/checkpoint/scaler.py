"""Dynamic loss scaling for fp16, with its state on the device so that no step waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.checkpoint.codec import StateDict

MIN_SCALE = 2.0**-14  # the reciprocal of a denormal scale is inf, so every later step would be skipped


class LossScaler:
    """Scale 2^16, doubled after 2000 clean steps, halved on overflow (Micikevicius et al. 2018, section 3.2).

    Never below 2^-14. ``scale`` is a 0-d float32 and ``clean_steps`` a 0-d int32 tensor on ``device``.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self.clean_steps = torch.tensor(0, dtype=torch.int32, device=device)
        self.growth = growth
        self.backoff = backoff
        self.interval = interval

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, whose gradients fit the range of fp16."""
        return loss * self.scale

    def unscale_(self, grads: list[Tensor]) -> None:
        """Divide gradients by the scale, in place. The scale is a power of two, so this is exact."""
        torch._foreach_mul_(grads, self.scale.reciprocal())

    def update(self, grad_norm: Tensor) -> None:
        """Update the scale after a step. A non-finite 0-d ``grad_norm`` means that the scale was too large."""
        overflowed = ~torch.isfinite(grad_norm)
        clean = self.clean_steps + 1
        grown = self.scale * self.growth
        shrunk = (self.scale * self.backoff).clamp_(min=MIN_SCALE)
        due = (clean >= self.interval) & torch.isfinite(grown)
        self.scale = torch.where(overflowed, shrunk, torch.where(due, grown, self.scale))
        self.clean_steps = torch.where(overflowed | due, torch.zeros_like(clean), clean)

    def state_dict(self) -> StateDict:
        return {"scale": float(self.scale), "clean_steps": int(self.clean_steps)}

    def load_state_dict(self, saved: StateDict) -> None:
        """Load the state. The initial scale stays if the run had no scaler before."""
        if not saved:
            return
        self.scale = torch.full_like(self.scale, max(saved["scale"], MIN_SCALE))
        self.clean_steps = torch.full_like(self.clean_steps, saved["clean_steps"])


class NoScaler:
    """The null object: fp32, tf32 and bf16 have the exponent range of fp32 and need no scale."""

    scale: Tensor | None = None

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, grads: list[Tensor]) -> None: ...

    def update(self, grad_norm: Tensor) -> None: ...

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, saved: StateDict) -> None: ...
