"""Checks the environment: Python, torch, CUDA, driver, NCCL, threads, limits (``trainwright env``).

``judge(gather())``: ``gather`` reads the facts of the system and of torch, and ``judge`` is a pure function of
these facts, so that other kinds of machines can be tested.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Literal

from trainwright.plan.machine import Machine, read_gpus, read_machine

RELEASE_NOTES = "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes"
OLDEST_DRIVERS: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver by major version of CUDA. It runs programs built with any minor version of it.

Source: ``RELEASE_NOTES``, tables of minimum required driver versions.
"""
DRIVERS: Mapping[str, str] = {
    "12.6": "560.28.03",
    "12.8": "570.26",
    "12.9": "575.51.03",
    "13.0": "580.65.06",
    "13.1": "590.44.01",
    "13.2": "595.45.04",
}
"""The Linux driver released with each CUDA version: the oldest that can compile kernels of this version at run time.

Source: ``RELEASE_NOTES``, table of corresponding driver versions.
"""


@dataclass(frozen=True)
class Stack:
    """Pinned versions of an image. ``name`` is the build argument of the image, and a folder of the torch wheel index.

    ``cuda`` is the CUDA version of the torch wheel, None for the CPU. ``nccl`` is the version that the wheel requires.
    If ``nccl`` is None (unknown), the loaded version must only be equal to the installed one.
    """

    name: str
    cuda: str | None = None
    nccl: str | None = None

    @property
    def driver(self) -> str | None:
        """The oldest Linux driver that runs this CUDA version; None if no driver is needed."""
        return None if self.cuda is None else OLDEST_DRIVERS[int(self.cuda.partition(".")[0])]


STACKS: Mapping[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack("cpu"),
        Stack("cu126", cuda="12.6"),
        Stack("cu129", cuda="12.9"),
        Stack("cu130", cuda="13.0", nccl="2.29.7"),
    )
}
"""The wheels of the torch version in constraints.txt. ``nccl``: as required by the metadata of the wheel."""


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The build and state of torch. Versions are as torch writes them; None if torch was built without the library."""

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
        cudnn, cudnn_error = _read_cudnn(torch)
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
            nccl=_read_nccl(torch) if nccl_built and torch.version.cuda else None,
            num_threads=torch.get_num_threads(),
            numpy_error=_numpy_error(torch),
        )
    return facts, ""


def _read_nccl(torch: ModuleType) -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()[:3])  # pre-releases have a fourth part, a string


def _read_cudnn(torch: ModuleType) -> tuple[int | None, str]:
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


Verdict = Literal["info", "ok", "warn", "bad"]
_PYTHON_MIN = (3, 11)
_TORCH_MIN, _TORCH_END = (2, 11), (2, 16)  # from the end on, torch is not tested
_GIB = 1 << 30
_SHM_MIN_BYTES = 1 * _GIB  # data workers pass batches through it; a container's default is 64 MiB
_FILES_MIN = 1024  # workers and shards need several hundred


@dataclass(frozen=True)
class Line:
    """The result of one check. ``remedy`` is empty when there is nothing to do."""

    verdict: Verdict
    what: str
    value: str
    remedy: str = ""


def judge(facts: SystemFacts, *, stack: Stack | None = None, gpus: int = 0) -> list[Line]:
    """Return the lines of every check, in reading order.

    Args:
        facts: The result of ``gather``.
        stack: The expected combination of CUDA, driver and NCCL; None accepts any compatible combination.
        gpus: Minimum number of visible GPUs.
    """
    lines = [line for check in _CHECKS for line in check(facts)]
    if stack is not None:
        lines += _compare_stack(facts, stack)
    if gpus:
        lines.append(_enough_gpus(facts, gpus))
    return lines


def exit_status(lines: Sequence[Line]) -> int:
    """Return 1 when something is bad, else 0: warnings do not fail a script."""
    return int(any(line.verdict == "bad" for line in lines))


def render(lines: Sequence[Line]) -> str:
    """Return the lines as plain text, each with its remedy below it."""
    width = max((len(line.what) for line in lines), default=0)
    rows = []
    for line in lines:
        rows.append(f"{line.verdict:<4}  {line.what:<{width}}  {line.value}")
        if line.remedy:
            rows.append(f"{'':<4}  {'':<{width}}  -> {line.remedy}")
    return "\n".join(rows)


def _python(facts: SystemFacts) -> Iterator[Line]:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < _PYTHON_MIN:
        yield Line("bad", "python", version, f"install Python {_dotted(_PYTHON_MIN)} or newer")
    else:
        yield Line("ok", "python", version)


def _torch(facts: SystemFacts) -> Iterator[Line]:
    torch = facts.torch
    if torch is None:
        yield Line("bad", "torch", facts.torch_error, "install it: https://pytorch.org/get-started/locally")
        return
    version = _numbers(torch.version)[:2]
    supported = f"{_dotted(_TORCH_MIN)} to {_TORCH_END[0]}.{_TORCH_END[1] - 1}"
    if version < _TORCH_MIN:
        yield Line("bad", "torch", torch.version, f"install a supported version: {supported}")
    elif version >= _TORCH_END:
        yield Line("warn", "torch", torch.version, f"newer than the tested versions: {supported}")
    else:
        yield Line("ok", "torch", torch.version)


def _numpy(facts: SystemFacts) -> Iterator[Line]:
    if facts.torch is None:
        return
    if facts.torch.numpy_error:
        remedy = "torch was built for another numpy: reinstall both together (pip install -U torch numpy)"
        yield Line("bad", "numpy", f"{facts.numpy or 'missing'}: {facts.torch.numpy_error}", remedy)
    else:
        yield Line("ok", "numpy", facts.numpy or "missing")


def _gpus(facts: SystemFacts) -> Iterator[Line]:
    for gpu in facts.machine.gpus:
        memory = f"{gpu.memory_bytes / _GIB:.0f} GiB"
        yield Line("info", f"gpu {gpu.index}", f"{gpu.name}, {memory}, compute {_dotted(gpu.compute_capability)}")
    if facts.hidden_gpus:
        variable = facts.variables.get("CUDA_VISIBLE_DEVICES")
        yield Line("info", "hidden gpus", f"{facts.hidden_gpus} (CUDA_VISIBLE_DEVICES={variable!r})")
    if not facts.machine.gpus and not facts.hidden_gpus:
        yield Line("info", "gpu", "no NVIDIA driver or GPU found")


def _cuda(facts: SystemFacts) -> Iterator[Line]:
    torch, gpus = facts.torch, facts.machine.gpus
    if torch is None or torch.hip_build:
        return
    if torch.cuda_build is None:
        if gpus:
            remedy = "install torch with CUDA: https://pytorch.org/get-started/locally"
            yield Line("bad", "cuda", f"torch is a CPU build, but there is {gpus[0].name}", remedy)
        else:
            yield Line("info", "cuda", "torch is a CPU build")
        return
    built = f"torch is built with {torch.cuda_build}"
    old_driver = _old_driver(facts.driver_cuda, torch.cuda_build, gpus[0].driver if gpus else "the driver")
    if old_driver:
        yield old_driver
    if torch.cuda_available:
        yield Line("ok", "cuda", f"{built} and sees the GPU")
    elif not gpus or old_driver:
        yield Line("info", "cuda", f"{built}, there is no GPU that it can use")
    else:
        reason = torch.cuda_error or "torch.cuda.is_available() is false"
        remedy = "run nvidia-smi: if it fails too, the driver needs a reinstall or a reboot"
        yield Line("bad", "cuda", f"{built} but cannot use the GPU: {reason}", remedy)


def _old_driver(driver_cuda: tuple[int, int] | None, build: str, driver: str) -> Line | None:
    """Return a line if the driver is older than the CUDA version that torch was built with.

    CUDA guarantees that a driver runs every build for its own major version, but no build for a later major version
    (docs.nvidia.com/deploy/cuda-compatibility: minor version compatibility).
    """
    built = _numbers(build)[:2]
    if driver_cuda is None or driver_cuda >= built:
        return None
    value = f"{driver} is for CUDA {_dotted(driver_cuda)}, torch is built with {build}"
    is_older_major = driver_cuda[0] < built[0]
    version = OLDEST_DRIVERS.get(built[0]) if is_older_major else DRIVERS.get(_dotted(built))
    update = f"update the driver{f' to {version} or newer' if version else ''} ({RELEASE_NOTES})"
    if is_older_major:
        return Line("bad", "driver", value, f"{update}, or install torch for CUDA {driver_cuda[0]}.x")
    return Line("warn", "driver", value, f"kernels that are compiled at run time may fail: {update}")


def _compare_stack(facts: SystemFacts, stack: Stack) -> Iterator[Line]:
    """Compare the installed versions with the combination that an image or a job file pins."""
    build = facts.torch.cuda_build if facts.torch is not None else None
    found = f"CUDA {build}" if build else "the CPU"
    expected = f"CUDA {stack.cuda}" if stack.cuda else "the CPU"
    if found != expected:
        remedy = f"install torch from the index {stack.name}, or name the stack that is installed"
        yield Line("bad", "stack", f"{stack.name} has torch for {expected}, installed is torch for {found}", remedy)
        return
    needs = f", needs driver {stack.driver} or newer" if stack.driver else ""
    yield Line("ok", "stack", f"{stack.name}: torch for {expected}{needs}")
    loaded = _dotted(facts.torch.nccl or ()) if facts.torch is not None else ""
    if stack.nccl and loaded and loaded != stack.nccl:
        remedy = "ranks with different versions cannot meet: use the same image on all nodes, clear LD_LIBRARY_PATH"
        yield Line("bad", "nccl of stack", f"{loaded} is loaded, {stack.name} has {stack.nccl}", remedy)
    elif stack.nccl and loaded:
        yield Line("ok", "nccl of stack", loaded)


def _enough_gpus(facts: SystemFacts, expected: int) -> Line:
    found = len(facts.machine.gpus)
    if found >= expected:
        return Line("ok", "gpus", f"{found}, at least {expected}")
    remedy = "start the container with --gpus all, request GPUs from the scheduler, or use another node"
    return Line("bad", "gpus", f"{found} visible, {expected} expected", remedy)


def _architectures(facts: SystemFacts) -> Iterator[Line]:
    if facts.torch is None or not facts.torch.arch_list or facts.torch.hip_build:
        return
    archs = facts.torch.arch_list
    for gpu in facts.machine.gpus:
        runs = runs_on(archs, gpu.compute_capability)
        if runs == "no":
            value = (
                f"torch has no kernels for compute {_dotted(gpu.compute_capability)} ({gpu.name}): {' '.join(archs)}"
            )
            remedy = "install a torch build that lists this GPU (older GPUs: an older CUDA, newer: a newer one)"
            yield Line("bad", f"kernels of gpu {gpu.index}", value, remedy)
        elif runs == "compiled":
            value = f"compiled at the first run for compute {_dotted(gpu.compute_capability)}"
            yield Line("warn", f"kernels of gpu {gpu.index}", value, "slow start: install a build for this GPU")


def runs_on(archs: Sequence[str], capability: tuple[int, int]) -> Literal["yes", "compiled", "no"]:
    """Return whether kernels for ``archs`` (``sm_90``, ``compute_90``) run on a GPU of this compute capability.

    Machine code (sm) runs on GPUs of its own major version with the same or a later minor version; with suffix "a" only
    on its exact version. PTX (compute) is compiled for the same and every later version; with a suffix, only for the
    versions on which machine code with this suffix runs
    (docs.nvidia.com/cuda/cuda-c-programming-guide: compute capability, architecture-specific features).
    """
    compiled = False
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        kind = match[1]
        suffix = match[4]
        built = (int(match[2]), int(match[3]))
        same_family = built[0] == capability[0] and built[1] <= capability[1]
        fits = built == capability if suffix == "a" else same_family
        if kind == "sm" and fits:
            return "yes"
        compiled |= kind == "compute" and (fits if suffix else built <= capability)
    return "compiled" if compiled else "no"


def _cudnn(facts: SystemFacts) -> Iterator[Line]:
    if facts.torch is None or facts.torch.cuda_build is None or not facts.machine.gpus:
        return
    if facts.torch.cudnn_error:
        remedy = "another cuDNN comes first: clear LD_LIBRARY_PATH, or reinstall torch with its nvidia-cudnn package"
        yield Line("bad", "cudnn", facts.torch.cudnn_error, remedy)
    elif facts.torch.cudnn is None:
        yield Line(
            "warn", "cudnn", "missing", "convolutions will be slow: reinstall torch with its nvidia-cudnn package"
        )
    else:
        number = facts.torch.cudnn  # 91002 is 9.10.2
        yield Line("ok", "cudnn", f"{number // 10000}.{number // 100 % 100}.{number % 100}")


def _nccl(facts: SystemFacts) -> Iterator[Line]:
    torch = facts.torch
    if torch is None or torch.cuda_build is None or not facts.machine.gpus:
        return
    if not torch.nccl_built:
        if len(facts.machine.gpus) > 1:
            remedy = "install a Linux build of torch with NCCL: training on several GPUs needs it"
            yield Line("bad", "nccl", "missing", remedy)
        else:
            yield Line("info", "nccl", "missing")
        return
    loaded = _dotted(torch.nccl or ())
    if torch.nccl and facts.nccl_package and _numbers(facts.nccl_package)[:3] != torch.nccl[:3]:
        value = f"{loaded} is loaded, but the package torch came with is {facts.nccl_package}"
        remedy = "another NCCL comes first: clear LD_LIBRARY_PATH and LD_PRELOAD, or reinstall torch"
        yield Line("warn", "nccl", value, remedy)
    else:
        yield Line("ok", "nccl", loaded)


def _cpu(facts: SystemFacts) -> Iterator[Line]:
    machine = facts.machine
    yield Line("info", "cpu", f"{machine.cpu}, {machine.cores} cores ({' '.join(machine.cpu_flags) or 'plain'})")
    bf16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_flags)
    yield Line("info", "bf16 on cpu", "in hardware" if bf16 else "emulated, slow: prefer fp32")
    available, total = machine.available_bytes / _GIB, machine.memory_bytes / _GIB
    yield Line("info", "memory", f"{available:.1f} of {total:.1f} GiB available")


def _threads(facts: SystemFacts) -> Iterator[Line]:
    if facts.torch is None:
        return
    threads, cores = facts.torch.num_threads, facts.machine.cores
    set_by = [f"{name}={facts.variables[name]}" for name in THREAD_VARIABLES if name in facts.variables]
    value = f"{threads} for {cores} cores" + (f" ({', '.join(set_by)})" if set_by else "")
    if threads > cores:
        yield Line("warn", "threads", value, f"threads compete for cores: export OMP_NUM_THREADS={cores}")
    elif threads < cores and set_by and not facts.machine.gpus:
        yield Line("warn", "threads", value, f"cores stay idle: export OMP_NUM_THREADS={cores}")
    else:
        yield Line("ok", "threads", value)


def _shared_memory(facts: SystemFacts) -> Iterator[Line]:
    if facts.shm_bytes is None:
        return
    value = f"{facts.shm_bytes / (1 << 20):.0f} MiB"
    if facts.shm_bytes < _SHM_MIN_BYTES:
        remedy = "data workers may die of a bus error: docker run --shm-size=8g (or --ipc=host), or 0 workers"
        yield Line("warn", "/dev/shm", value, remedy)
    else:
        yield Line("ok", "/dev/shm", value)


def _open_files(facts: SystemFacts) -> Iterator[Line]:
    if facts.open_files is None:
        return
    soft, hard = facts.open_files
    if soft < _FILES_MIN:
        how = (
            f"ulimit -n {min(hard, 65536)}" if hard > soft else "ask for a higher limit (limits.conf, --ulimit nofile)"
        )
        yield Line("warn", "open files", f"{soft} at most", f"workers may fail with 'too many open files': {how}")
    else:
        yield Line("ok", "open files", f"{soft} at most")


_CHECKS: tuple[Callable[[SystemFacts], Iterator[Line]], ...] = (
    *(_python, _torch, _numpy, _gpus, _cuda, _architectures, _cudnn, _nccl),
    *(_cpu, _threads, _shared_memory, _open_files),
)


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13, 0) for "2.13.0+cu130" and for "2.13.0a0"."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
