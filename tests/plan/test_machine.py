"""Facts of this machine against the system's own tools, and of others from what their system files say."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainwright.plan.machine import (
    Limits,
    parse_cgroup_paths,
    parse_cpu_quota,
    parse_cpuinfo,
    parse_memory_limit,
    read_gpus,
    read_limits,
    read_machine,
    select_visible,
)

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu vme sse4_2 avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8
vmx flags\t: vnmi preemption_timer

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
GRACE = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd evtstrm aes sve asimddp sve2 i8mm bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd4f
"""
RASPBERRY = "processor\t: 0\nmodel name\t: ARMv7 Processor rev 3 (v7l)\nFeatures\t: half thumb neon vfpv4\n"
V1 = """12:cpu,cpuacct:/docker/abc
8:memory:/docker/abc
1:name=systemd:/docker/abc
0::/system.slice/docker.service
"""
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        (XEON, "Intel(R) Xeon(R) Platinum 8480+", ("amx_bf16", "avx2", "avx512_bf16", "avx512f")),
        (GRACE, "ARM implementer 0x41 part 0xd4f", ("bf16", "neon")),
        (RASPBERRY, "ARMv7 Processor rev 3 (v7l)", ()),
        ("", "", ()),
    ],
)
def test_cpuinfo(text: str, name: str, flags: tuple[str, ...]) -> None:
    assert parse_cpuinfo(text) == (name, flags)


def test_texts_of_control_groups_without_a_limit() -> None:
    assert parse_cgroup_paths("0::/user.slice/a:b.scope\n") == {"": "/user.slice/a:b.scope"}
    assert parse_cpu_quota("max", "100000") == parse_cpu_quota("-1", "100000\n") == math.inf
    assert parse_memory_limit("max\n") == math.inf
    assert parse_memory_limit("9223372036854771712\n") == math.inf


def write(root: Path, **texts: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (root / name.replace("__", ".")).write_text(text)


def test_limits_of_v2_are_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    slice_ = tmp_path / "user.slice"
    stat = "anon 1\ninactive_file 1073741824\n"
    write(slice_, cpu__max="800000 100000", memory__max=str(16 * GIB), memory__current=str(15 * GIB), memory__stat=stat)
    job = {"cpu__max": "max 100000", "memory__max": str(8 * GIB), "memory__current": str(GIB), "memory__stat": ""}
    write(slice_ / "job.scope", **job)
    assert read_limits(tmp_path, "0::/user.slice/job.scope\n") == Limits(8.0, 8 * GIB, 2 * GIB)


def test_limits_of_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    write(tmp_path, cpu__max="250000 100000", memory__max=str(4 * GIB), memory__current=str(5 * GIB))
    assert read_limits(tmp_path, "0::/kubepods/pod1/../../x\n") == Limits(2.5, 4 * GIB, 0.0)


def test_limits_of_v1(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "docker" / "abc", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    write(
        tmp_path / "memory",  # docker mounts the container's own group as the root
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat="inactive_file 0\ntotal_inactive_file 1024\n",
    )
    assert read_limits(tmp_path, V1) == Limits(1.5, 2 * GIB, GIB + 1024)


def test_no_control_groups_are_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "none", "") == Limits(math.inf, math.inf, math.inf)


A, B, C = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"


@pytest.mark.parametrize(
    ("visible", "positions"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,7,1", [0]),
        ("1,1", [1]),
        ("GPU-cc,0", [2, 0]),
        ("GPU-aa", []),
        ("MIG-cccc", []),
        ("NoDevFiles", []),
    ],
)
def test_select_visible_as_cuda_does(visible: str | None, positions: list[int]) -> None:
    assert select_visible([A, B, C], visible) == positions


def test_this_machine_as_the_system_sees_it() -> None:
    machine = read_machine()
    if sys.platform == "linux":
        assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert 0 < machine.available_bytes < machine.memory_bytes <= psutil.virtual_memory().total
    assert machine.cpu
    assert machine.gpus == read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or os.cpu_count() == 1, reason="no second core to do without")
def test_a_process_that_is_pinned_has_the_cores_it_is_pinned_to() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from trainwright.plan.machine import read_machine; print(read_machine().cores)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"


@pytest.mark.process
def test_torch_is_not_imported() -> None:
    code = "import sys, trainwright.plan.machine as m; m.read_machine(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
