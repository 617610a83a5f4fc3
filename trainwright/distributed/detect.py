"""Which device this process computes on."""

from __future__ import annotations

import os

import torch

from trainwright.errors import UsageError
from trainwright.plan.machine import Machine


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """``auto`` takes a CUDA device where there is one, else the CPU: the one of ``local_rank``, this process's number
    on its machine.

    Raises UsageError when CUDA is asked for and not there.
    """
    if name == "auto":
        return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA (a CPU build)"
        raise UsageError(
            f"device {name!r} was asked for, but torch sees no CUDA device; torch is built for {built}",
            remedy="use device: cpu or auto, or run `trainwright env` to see what is missing",
        )
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def low_precision(device: torch.device, machine: Machine) -> tuple[str, ...]:
    """Which of tf32, bf16, fp16, fp8 and mxfp8 the device computes in hardware."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        least = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9), "mxfp8": (10, 0)}
        # of the consumer cards with compute capability 12, torchao has no MXFP8 kernels
        return tuple(
            name for name, needed in least.items() if capability >= needed and (name != "mxfp8" or capability < (12, 0))
        )
    flags = {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_flags)
    return ("bf16",) if flags else ()


def usable_threads(device: torch.device) -> tuple[int, ...]:
    """Numbers of CPU threads worth trying, the most first: one choice only where the user or a GPU decides."""
    most = torch.get_num_threads()
    decided = device.type != "cpu" or "OMP_NUM_THREADS" in os.environ or most == 1
    return (most,) if decided else (most, 1)


def device_name(device: torch.device, machine: Machine) -> str:
    """The name of the device for people, such as that of the GPU or CPU model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.cpu
