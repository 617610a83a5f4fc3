"""Reads which ranks NCCL misses, from the RAS service that NCCL runs in each process (NCCL 2.24 and newer).

Text format: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html. The JSON format is not
used, because NCCL 2.28.9 leaves out a comma in it if a rank is missing. Not tested on a device.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress

from torch import distributed

QUERY = b"VERBOSE STATUS\n"
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 1.0, 10.0  # NCCL waits 5 s for each process that does not answer
MAX_CHARACTERS = 2**20
_COMMUNICATOR = re.compile(r"#\S+ \((\w+)\) ")
_DIFFERENT = re.compile(r"Communicator ranks have different (?:(\w+) operation counts)?")
_SEVERAL = re.compile(r"(\d+ ranks have (?:launched up to operation \d+|not launched any operations))")
_ONE = re.compile(r"(Rank \d+ has (?:launched up to operation \d+|not launched any operations)) -- ")
_MEMBER = re.compile(r"Rank (\d+) -- ")
_MISSING = re.compile(r"The (missing ranks?: [\d, -]+)|(Process \d+ on node \S+ managing GPUs? .*)")


def uses_nccl() -> bool:
    """Return True if the default group of this process communicates by NCCL on some device."""
    return distributed.is_initialized() and "nccl" in str(distributed.get_backend_config())


def ras_report() -> str:
    """Return what the RAS service of a process on this machine reports about the job; "" without an answer.

    NCCL collects the state of all processes, which takes seconds if one does not answer. The address is in
    ``NCCL_RAS_ADDR``, localhost:28028 by default.
    """
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    with suppress(OSError, ValueError):
        address = (host.strip("[]") or "localhost", int(port))
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.sendall(QUERY)
            with connection.makefile(encoding="utf-8", errors="replace") as answer:
                return answer.read(MAX_CHARACTERS)
    return ""


def ras_problems(report: str) -> tuple[str, ...]:
    """Return missing processes and ranks, and different counts of collectives, as one text for each communicator.

    Ranks are numbered within their communicator, which may contain only some of the ranks of the job.
    """
    found: list[list[str]] = []
    counts: list[str] = []
    title = ""
    for line in map(str.strip, report.splitlines()):
        if match := _COMMUNICATOR.match(line):
            title = f"communicator {match[1]}"
        elif match := _MISSING.match(line):
            found.append([f"{title}: {match[1]}" if match[1] else f"no answer: {match[2]}"])
        elif match := _DIFFERENT.match(line):
            counts = [f"{title}: {match[1]} operations"] if match[1] else []  # a different status is no sign of a hang
            found += [counts] if counts else []
        elif counts and (match := _SEVERAL.match(line) or _ONE.match(line)):
            counts.append(match[1])
        elif counts and (match := _MEMBER.match(line)):
            counts[-1] += f"{',' if ': rank' in counts[-1] else ': rank'} {match[1]}"
    return tuple("; ".join(each) for each in found)
