"""Which device this process computes on."""

from __future__ import annotations

import torch

from trainwright.errors import UsageError


def choose_device(asked: str) -> torch.device:
    """``auto`` takes the first CUDA device where there is one, else the CPU.

    Raises UsageError when CUDA is asked for and not there.
    """
    if asked == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if asked.startswith("cuda") and not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA (a CPU build)"
        raise UsageError(
            f"device {asked!r} was asked for, but torch sees no CUDA device; torch is built for {built}",
            remedy="use device: cpu or auto, or run `trainwright env` to see what is missing",
        )
    return torch.device(asked)
