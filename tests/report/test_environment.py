"""Verdicts on environments that fit together and on those that do not, from synthetic facts; and this one's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from trainwright.plan.machine import Gpu, Machine
from trainwright.report.environment import (
    STACKS,
    Line,
    SystemFacts,
    TorchFacts,
    exit_status,
    gather,
    judge,
    render,
    runs_on,
)

GIB = 1 << 30
H100 = Gpu(0, "NVIDIA H100", 80 * GIB, (9, 0), "570.86")
CPU = Machine(cores=16, memory_bytes=64 * GIB, available_bytes=60 * GIB, cpu="EPYC", cpu_flags=("avx2", "avx512_bf16"))
CUDA_TORCH = TorchFacts(
    version="2.13.0+cu128",
    cuda_build="12.8",
    cuda_available=True,
    arch_list=("sm_80", "sm_90", "sm_100", "sm_120"),
    cudnn=91002,
    nccl_built=True,
    nccl=(2, 27, 3),
    num_threads=16,
)
GOOD = SystemFacts(
    python=(3, 11, 7),
    torch=CUDA_TORCH,
    numpy="2.4.6",
    machine=replace(CPU, gpus=(H100,)),
    driver_cuda=(12, 8),
    nccl_package="2.27.3",
    shm_bytes=32 * GIB,
    open_files=(65536, 65536),
)
CPU_ONLY = replace(
    GOOD,
    machine=CPU,
    torch=TorchFacts(version="2.13.0+cpu", num_threads=16),
    driver_cuda=None,
    nccl_package=None,
)


def with_torch(facts: SystemFacts, **changes: Any) -> SystemFacts:
    assert facts.torch is not None
    return replace(facts, torch=replace(facts.torch, **changes))


def with_gpus(facts: SystemFacts, *gpus: Gpu) -> SystemFacts:
    return replace(facts, machine=replace(facts.machine, gpus=gpus))


def faults(facts: SystemFacts) -> list[tuple[str, str]]:
    """(verdict, what) of what is not in order; each says what to do."""
    lines = [line for line in judge(facts) if line.verdict in ("warn", "bad")]
    assert all(line.remedy for line in lines)
    return [(line.verdict, line.what) for line in lines]


@pytest.mark.parametrize("facts", [GOOD, CPU_ONLY])
def test_what_fits_together_has_no_faults(facts: SystemFacts) -> None:
    assert faults(facts) == []
    assert all(line.remedy == "" for line in judge(facts))
    assert exit_status(judge(facts)) == 0


H100_TWICE = (H100, replace(H100, index=1))
B200 = replace(H100, name="NVIDIA B200", compute_capability=(10, 3))
PASCAL = replace(H100, name="Tesla P100", compute_capability=(6, 0))

CASES: dict[str, tuple[SystemFacts, list[tuple[str, str]]]] = {
    "python too old": (replace(GOOD, python=(3, 10, 2)), [("bad", "python")]),
    "torch missing": (replace(CPU_ONLY, torch=None, torch_error="No module named 'torch'"), [("bad", "torch")]),
    "torch too old": (with_torch(GOOD, version="2.10.1+cu128"), [("bad", "torch")]),
    "torch pre-release of the first": (with_torch(GOOD, version="2.11.0a0+git1"), []),
    "torch last supported": (with_torch(GOOD, version="2.15.1"), []),
    "torch too new": (with_torch(GOOD, version="2.16.0.dev20270101"), [("warn", "torch")]),
    "numpy does not fit": (with_torch(GOOD, numpy_error="Numpy is not available"), [("bad", "numpy")]),
    "cpu wheel on a gpu machine": (
        replace(CPU_ONLY, machine=GOOD.machine, driver_cuda=(12, 8)),
        [("bad", "cuda")],
    ),
    "driver of an older major": (
        with_torch(replace(GOOD, driver_cuda=(12, 4)), cuda_build="13.0", cuda_available=False, arch_list=()),
        [("bad", "driver")],
    ),
    "driver of an older minor": (replace(GOOD, driver_cuda=(12, 4)), [("warn", "driver")]),
    "driver newer than the build": (replace(GOOD, driver_cuda=(13, 0)), []),
    "driver fails": (with_torch(GOOD, cuda_available=False, cuda_error="unknown error"), [("bad", "cuda")]),
    "gpu too new for the build": (
        with_gpus(with_torch(GOOD, arch_list=("sm_80", "sm_90")), B200),
        [("bad", "kernels of gpu 0")],
    ),
    "gpu too old for the build": (with_gpus(GOOD, H100, replace(PASCAL, index=1)), [("bad", "kernels of gpu 1")]),
    "gpu by just-in-time": (
        with_gpus(with_torch(GOOD, arch_list=("sm_80", "compute_90")), B200),
        [("warn", "kernels of gpu 0")],
    ),
    "cudnn of another version": (with_torch(GOOD, cudnn=None, cudnn_error="incompatibility"), [("bad", "cudnn")]),
    "cudnn missing": (with_torch(GOOD, cudnn=None), [("warn", "cudnn")]),
    "nccl missing on one gpu": (with_torch(GOOD, nccl_built=False, nccl=None), []),
    "nccl missing on two gpus": (
        with_gpus(with_torch(GOOD, nccl_built=False, nccl=None), *H100_TWICE),
        [("bad", "nccl")],
    ),
    "another nccl is loaded": (with_torch(GOOD, nccl=(2, 18, 1)), [("warn", "nccl")]),
    "too many threads": (with_torch(CPU_ONLY, num_threads=64), [("warn", "threads")]),
    "torchrun left one thread": (
        with_torch(replace(CPU_ONLY, variables={"OMP_NUM_THREADS": "1"}), num_threads=1),
        [("warn", "threads")],
    ),
    "one thread beside a gpu": (
        with_torch(replace(GOOD, variables={"OMP_NUM_THREADS": "1"}), num_threads=1),
        [],
    ),
    "hyperthreads: half the cores": (with_torch(CPU_ONLY, num_threads=8), []),
    "a container's /dev/shm": (replace(GOOD, shm_bytes=64 << 20), [("warn", "/dev/shm")]),
    "few open files": (replace(GOOD, open_files=(256, 10240)), [("warn", "open files")]),
    "mac": (replace(CPU_ONLY, shm_bytes=None, open_files=None), []),
    "rocm": (with_torch(CPU_ONLY, hip_build="7.0", cuda_available=True, arch_list=("gfx942",)), []),
    "all gpus hidden": (
        with_torch(
            replace(with_gpus(GOOD), hidden_gpus=2, variables={"CUDA_VISIBLE_DEVICES": ""}),
            cuda_available=False,
        ),
        [],
    ),
    "several at once": (
        replace(with_torch(GOOD, num_threads=17), shm_bytes=0, python=(3, 9, 0)),
        [("bad", "python"), ("warn", "threads"), ("warn", "/dev/shm")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_exactly_these_faults_are_found(case: str) -> None:
    facts, expected = CASES[case]
    assert faults(facts) == expected


def test_lines_name_the_numbers() -> None:
    busy = with_torch(replace(CPU_ONLY, variables={"OMP_NUM_THREADS": "2"}), num_threads=999)
    assert "999 for 16 cores (OMP_NUM_THREADS=2)" in [line.value for line in judge(busy)]
    said = {line.what: line for line in judge(replace(GOOD, driver_cuda=(12, 4)))}
    assert said["driver"].value == "570.86 is for CUDA 12.4, torch is built with 12.8"
    assert said["cudnn"].value == "9.10.2"
    assert said["gpu 0"].value == "NVIDIA H100, 80 GiB, compute 9.0"
    (limit,) = [line for line in judge(replace(GOOD, open_files=(256, 10240))) if line.what == "open files"]
    assert limit.remedy.endswith("ulimit -n 10240")
    hidden = judge(replace(with_gpus(GOOD), hidden_gpus=2, variables={"CUDA_VISIBLE_DEVICES": ""}))
    assert "2 (CUDA_VISIBLE_DEVICES='')" in [line.value for line in hidden]


CUDA_13 = with_torch(
    replace(GOOD, driver_cuda=(13, 0), nccl_package="2.29.7"),
    version="2.13.0+cu130",
    cuda_build="13.0",
    nccl=(2, 29, 7),
)

PINNED: dict[str, tuple[SystemFacts, str, int, list[str]]] = {
    "as pinned": (CUDA_13, "cu130", 1, []),
    "image without a gpu, as when it is built": (with_gpus(CUDA_13), "cu130", 0, []),
    "cpu": (CPU_ONLY, "cpu", 0, []),
    "another build of torch": (GOOD, "cu130", 1, ["stack"]),
    "a build for the cpu": (CPU_ONLY, "cu130", 0, ["stack"]),
    "a build for CUDA as cpu": (CUDA_13, "cpu", 0, ["stack"]),
    "no torch": (replace(CPU_ONLY, torch=None, torch_error="No module named 'torch'"), "cu130", 0, ["torch", "stack"]),
    "an old driver": (replace(CUDA_13, driver_cuda=(12, 8)), "cu130", 1, ["driver"]),
    "another nccl on this node": (
        replace(with_torch(CUDA_13, nccl=(2, 27, 3)), nccl_package=None),
        "cu130",
        1,
        ["nccl of stack"],
    ),
    "too few gpus": (CUDA_13, "cu130", 8, ["gpus"]),
}


@pytest.mark.parametrize("case", PINNED)
def test_a_pinned_stack_names_what_differs(case: str) -> None:
    facts, stack, gpus, expected = PINNED[case]
    lines = judge(facts, stack=STACKS[stack], gpus=gpus)
    assert [line.what for line in lines if line.verdict == "bad"] == expected
    assert all(line.remedy for line in lines if line.verdict == "bad")


def test_the_remedy_for_an_old_driver_names_the_version() -> None:
    old = judge(with_torch(replace(GOOD, driver_cuda=(12, 4)), cuda_build="13.0"))
    assert "update the driver to 580.65.06 or newer" in next(line.remedy for line in old if line.what == "driver")
    minor = judge(replace(GOOD, driver_cuda=(12, 4)))
    assert "update the driver to 570.26 or newer" in next(line.remedy for line in minor if line.what == "driver")


@pytest.mark.parametrize(
    ("archs", "capability", "answer"),
    [
        (["sm_80"], (8, 0), "yes"),
        (["sm_80"], (8, 6), "yes"),
        (["sm_86"], (8, 0), "no"),
        (["sm_80"], (9, 0), "no"),
        (["sm_90a"], (9, 0), "yes"),
        (["sm_100a"], (10, 3), "no"),
        (["sm_100f"], (10, 3), "yes"),
        (["sm_120"], (12, 1), "yes"),
        (["compute_80"], (9, 0), "compiled"),
        (["compute_90"], (8, 9), "no"),
        (["compute_90a"], (10, 0), "no"),
        (["compute_80", "sm_90"], (9, 0), "yes"),
        (["gfx942"], (9, 0), "no"),
        ([], (9, 0), "no"),
    ],
)
def test_runs_on(archs: list[str], capability: tuple[int, int], answer: str) -> None:
    assert runs_on(archs, capability) == answer


def test_only_a_bad_line_fails_a_script() -> None:
    warn, bad = Line("warn", "w", "v", "r"), Line("bad", "w", "v", "r")
    assert [exit_status(lines) for lines in ([], [warn], [warn, bad])] == [0, 0, 1]


def test_render() -> None:
    assert render([Line("ok", "python", "3.11.7"), Line("warn", "threads", "64 for 4 cores", "do it")]) == (
        "ok    python   3.11.7\n"
        "warn  threads  64 for 4 cores\n"
        "               -> do it"
    )  # fmt: skip
    assert render([]) == ""


def test_facts_of_this_environment_are_true() -> None:
    facts = gather()
    assert facts.torch is not None
    assert facts.torch.version == torch.__version__
    assert facts.torch.num_threads == torch.get_num_threads()
    assert facts.torch.numpy_error == ""
    assert facts.python == sys.version_info[:3]
    assert facts.torch.cuda_available == torch.cuda.is_available()
    assert "bad" not in {line.verdict for line in judge(facts)}
    json.dumps([asdict(line) for line in judge(facts)], allow_nan=False)


def run(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.process
def test_a_torch_that_cannot_be_imported_is_a_line_and_no_traceback() -> None:
    said = run(
        "import sys; sys.modules['torch'] = None\n"
        "from trainwright.report.environment import gather, judge, render\n"
        "print(render(judge(gather())))"
    )
    assert "bad   torch" in said


@pytest.mark.process
def test_torch_is_imported_only_by_gather() -> None:
    code = "import sys, trainwright.report.environment, trainwright.report.chart; print('torch' in sys.modules)"
    assert run(code) == "False\n"
