"""NCCL's reports on a job that hangs, as NVIDIA has published them, and the query of a service."""

from __future__ import annotations

import socket
import threading

import pytest

from trainwright.distributed.ras import ras_problems, ras_report

# Excerpts of https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
HEALTHY = """
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         8         4         1         4        32   RUNNING      OK
"""
MISMATCH = """
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 3 -- GPU 3 managed by process 483075 on node 172.16.64.210
  Rank 4 -- GPU 4 managed by process 483076 on node 172.16.64.210
  Rank 5 -- GPU 5 managed by process 483077 on node 172.16.64.210
  Rank 7 -- GPU 7 managed by process 483079 on node 172.16.64.210
"""
INCOMPLETE = """
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
FINALIZE = """
#0-0 (9e17999afaa87dbb) MISMATCH
  Communicator ranks have different status
  26 ranks have status UNKNOWN
  4 ranks have status RUNNING
  Rank 0 -- GPU 0 managed by process 507285 on node 172.16.64.210
"""
# https://github.com/NVIDIA/nccl/issues/1911
AHEAD = """
Errors
======

Warnings
========

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124
  Rank 13 -- GPU 5 managed by process 323033 on node 10.137.190.124
"""
AHEAD_IN_SHORT = (
    "communicator fa93daea854b060b: AllGather operations; 30 ranks have launched up to operation 640; "
    "2 ranks have launched up to operation 641: rank 12, 13"
)
# The lines for a single rank, from rasClientRunComms in src/ras/client_support.cc of github.com/NVIDIA/nccl
ONE_BEHIND = """
#1-3 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
  Communicator ranks have different Broadcast operation counts
  7 ranks have launched up to operation 2
  Rank 7 has not launched any operations -- GPU 3 managed by process 1650386 on node node1
"""


@pytest.mark.parametrize(
    ("report", "problems"),
    [
        (HEALTHY, ()),
        (
            MISMATCH,
            (
                "communicator 27a079b828ff1a75: collective operations; 26 ranks have launched up to operation 6650; "
                "6 ranks have launched up to operation 6649: rank 0, 2, 3, 4, 5, 7",
            ),
        ),
        (
            INCOMPLETE,
            (
                "no answer: Process 3487984 on node 172.16.64.213 managing GPU 5",
                "communicator cf264af53edbe986: missing rank: 21",
            ),
        ),
        (FINALIZE, ()),
        (AHEAD + FINALIZE, (AHEAD_IN_SHORT,)),
        (AHEAD, (AHEAD_IN_SHORT,)),
        (
            ONE_BEHIND,
            (
                "communicator 78db921d1c117b4a: AllReduce operations; 7 ranks have launched up to operation 64; "
                "Rank 7 has launched up to operation 60",
                "communicator 78db921d1c117b4a: Broadcast operations; 7 ranks have launched up to operation 2; "
                "Rank 7 has not launched any operations",
            ),
        ),
        ("\x00 not a report", ()),
    ],
    ids=["healthy", "mismatch", "incomplete", "finalize", "two", "ahead", "one_behind", "other"],
)
def test_problems_of_published_reports(report: str, problems: tuple[str, ...]) -> None:
    assert ras_problems(report) == problems


def test_the_service_is_asked_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            asked.append(connection.recv(100))
            connection.sendall(INCOMPLETE[:70].encode())
            connection.sendall(INCOMPLETE[70:].encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=[server])
        thread.start()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")
        assert ras_report() == INCOMPLETE and asked == [b"VERBOSE STATUS\n"]
        thread.join()
    assert ras_report() == "", "the service has ended"


@pytest.mark.parametrize("address", ["", "nobody.invalid:28028", "localhost:port", ":::"])
def test_an_address_without_a_service(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    assert ras_report() == ""
