"""Reads the facts about the system and torch that ``trainwright env`` checks; allocates no GPU memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from trainwright.plan.machine import Machine, read_gpus, read_machine

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The build and state of torch. Versions are as torch writes them; None if it was built without the library."""

    version: str
    cuda_build: str | None = None
    hip_build: str | None = None
    cuda_available: bool = False
    cuda_error: str = ""
    arch_list: tuple[str, ...] = ()
    cudnn: int | None = None
    cudnn_error: str = ""
    nccl_built: bool = False
    nccl: tuple[int, ...] | None = None
    num_threads: int = 1
    numpy_error: str = ""


@dataclass(frozen=True, kw_only=True)
class SystemFacts:
    """The facts that ``judge`` checks. None: this system does not have it, or does not report it."""

    python: tuple[int, int, int]
    torch: TorchFacts | None
    torch_error: str = ""
    numpy: str | None = None
    machine: Machine
    hidden_gpus: int = 0
    driver_cuda: tuple[int, int] | None = None
    nccl_package: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    shm_bytes: int | None = None
    open_files: tuple[int, int] | None = None


def gather() -> SystemFacts:
    """Return the facts of this machine and environment. Imports torch (seconds), allocates no GPU memory."""
    machine = read_machine()
    torch, torch_error = _gather_torch()
    return SystemFacts(
        python=sys.version_info[:3],
        torch=torch,
        torch_error=torch_error,
        numpy=_package("numpy"),
        machine=machine,
        hidden_gpus=len(read_gpus(None)) - len(machine.gpus),
        driver_cuda=_driver_cuda(),
        nccl_package=_nccl_package(torch),
        variables={
            name: os.environ[name] for name in (*THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES") if name in os.environ
        },
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        open_files=_open_file_limits(),
    )


def _gather_torch() -> tuple[TorchFacts | None, str]:
    """Return the facts about torch, or the reason why it cannot be imported."""
    # torch reports an old driver and an incompatible numpy as warnings: they become lines of the report
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch
        except (ImportError, OSError) as error:  # OSError: a library that torch needs is missing or broken
            return None, _one_line(error)
        available = torch.cuda.is_available()
        complaints = [_one_line(warning.message) for warning in caught if "CUDA" in str(warning.message)]
        cudnn, cudnn_error = _cudnn(torch)
        nccl_built = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        facts = TorchFacts(
            version=torch.__version__,
            cuda_build=torch.version.cuda,
            hip_build=torch.version.hip,
            cuda_available=available,
            cuda_error="" if available else " ".join(complaints),
            arch_list=tuple(torch.cuda.get_arch_list()),
            cudnn=cudnn,
            cudnn_error=cudnn_error,
            nccl_built=nccl_built,
            nccl=_nccl(torch) if nccl_built and torch.version.cuda else None,
            num_threads=torch.get_num_threads(),
            numpy_error=_numpy_error(torch),
        )
    return facts, ""


def _nccl(torch: ModuleType) -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()[:3])  # pre-releases have a fourth part, a string


def _cudnn(torch: ModuleType) -> tuple[int | None, str]:
    if torch.version.cuda is None:
        return None, ""
    try:
        return torch.backends.cudnn.version(), ""
    except RuntimeError as error:  # the loaded version is not the one that torch was compiled with
        return None, _one_line(error)


def _numpy_error(torch: ModuleType) -> str:
    try:
        torch.zeros(1, device="cpu").numpy()
    except RuntimeError as error:  # "Numpy is not available"
        return _one_line(error)
    return ""


def _nccl_package(torch: TorchFacts | None) -> str | None:
    if torch is None or torch.cuda_build is None:
        return None
    return _package(f"nvidia-nccl-cu{torch.cuda_build.split('.')[0]}")


def _package(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12080 is 12.8
        return number // 1000, number % 1000 // 10
    finally:
        pynvml.nvmlShutdown()


def _open_file_limits() -> tuple[int, int] | None:
    """Return (soft, hard); None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = (sys.maxsize if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
