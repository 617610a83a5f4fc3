"""Detects the device of this process and its capabilities."""

from __future__ import annotations

import os

import torch

from trainwright.errors import UsageError
from trainwright.plan.machine import Machine


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of that name; "auto" is CUDA device ``local_rank`` if CUDA is available, else the CPU.

    ``local_rank`` is the number of this process on its machine. Raises UsageError if CUDA is requested but not
    available.
    """
    if name == "auto":
        return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA (a CPU build)"
        raise UsageError(
            f"device {name!r} was requested, but torch sees no CUDA device; torch is built for {built}",
            remedy="use device: cpu or auto, or run `trainwright env` to see what is missing",
        )
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def low_precision(device: torch.device, machine: Machine) -> tuple[str, ...]:
    """Return the names among tf32, bf16, fp16, fp8 and mxfp8 that the device computes in hardware."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        least = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9), "mxfp8": (10, 0)}
        # torchao has no MXFP8 kernels for the consumer cards with compute capability 12
        return tuple(
            name for name, needed in least.items() if capability >= needed and (name != "mxfp8" or capability < (12, 0))
        )
    flags = {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_flags)
    return ("bf16",) if flags else ()


def usable_threads(device: torch.device) -> tuple[int, ...]:
    """Return numbers of CPU threads worth trying, largest first: only one if the user or a GPU determines it."""
    most = torch.get_num_threads()
    decided = device.type != "cpu" or "OMP_NUM_THREADS" in os.environ or most == 1
    return (most,) if decided else (most, 1)


def device_name(device: torch.device, machine: Machine) -> str:
    """Return the display name of the device: the model of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.cpu
