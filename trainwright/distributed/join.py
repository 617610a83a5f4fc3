"""Joins the other processes of a run, as torchrun describes them in the environment."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainwright.distributed.group import SOLO, Ranks, World, is_of_exchange, lost_rank
from trainwright.errors import RankError, UsageError, text_of

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """How torchrun started this process: as ``rank`` of ``size``, for the ``attempt``-th time (from 0).

    ``local_rank`` is its number on its machine. ``job`` is the id of the launch, the same for all attempts; of a launch
    without one, the process of torchrun. ``call`` counts the runs of a script that trains more than once.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    attempt: int = 0
    job: str = ""
    address: str = ""
    port: int = 0
    agent_has_store: bool = False
    call: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch:
        """Returns what torchrun says, also of a launch of one rank; one process without a launch where it is not there.

        Raises UsageError where the environment says that there are several ranks, and not how to meet them.
        """
        missing = [name for name in _NAMES if name not in environ]
        is_one = environ.get("WORLD_SIZE", "1") == "1"
        if "LOCAL_RANK" in missing or (is_one and (missing or "TORCHELASTIC_RUN_ID" not in environ)):
            return cls()  # a job of Slurm or MPI with one task sets WORLD_SIZE, too
        numbers = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        wrong = [f"{name}={value}" for name, value in numbers.items() if not value.isdecimal()]
        if missing or wrong:
            raise UsageError(
                f"the environment has several ranks, but {', '.join([*missing, *wrong])} is missing or no number",
                remedy="start it with torchrun: trainwright train RECIPE -- --nproc-per-node 2",
            )
        job = environ.get("TORCHELASTIC_RUN_ID", "")
        return cls(
            rank=int(environ["RANK"]),
            size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            job=job if job not in ("", "none") else f"{socket.gethostname()}:{os.getppid()}",
            address=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            agent_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            call=next(_CALLS),
        )


ALONE = Launch()
_CALLS = itertools.count()
_STORES: dict[tuple[str, int], TCPStore] = {}


@contextmanager
def joined(launch: Launch, timeout_s: float, *, on_gpu: bool = False) -> Iterator[World]:
    """Yields the World of this process: SOLO, or the ranks once all have come. Leaves the group at the end.

    A group that the caller has made already is used and left alone. ``timeout_s`` is how long a rank waits for the
    others before it gives up. Raises RankError when they do not come, UsageError where a rank has no GPU of its own.
    """
    on_gpu = on_gpu and torch.cuda.is_available()
    if on_gpu and launch.local_rank >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"rank {launch.rank} is number {launch.local_rank} (from 0) of its machine, which has {count} GPUs",
            remedy="start as many processes as there are GPUs (--nproc-per-node gpu), or set device: cpu",
        )
    if distributed.is_available() and distributed.is_initialized():
        yield Ranks() if distributed.get_world_size() > 1 else SOLO
        return
    if launch.size == 1:
        yield SOLO
        return
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    _open(launch, timedelta(seconds=timeout_s), "cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield Ranks()
    except RuntimeError as error:
        if is_of_exchange(error):
            raise lost_rank("exchange weights or gradients", error) from error
        raise
    finally:
        distributed.destroy_process_group()


def _open(launch: Launch, timeout: timedelta, backend: str) -> None:
    """With a store of this call's own: in torchrun's the addresses of those before may still lie.

    A store that torchrun does not keep is new at each attempt, of which the agent of a node that came back knows no
    number.
    """
    try:
        attempt = launch.attempt if launch.agent_has_store else 0
        own = PrefixStore(f"trainwright/{attempt}/{launch.call}", _store(launch, timeout))
        distributed.init_process_group(backend, store=own, rank=launch.rank, world_size=launch.size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {launch.rank} could not meet the other {launch.size - 1} at {launch.address}:{launch.port}: "
            f"{text_of(error)[:300]}",
            remedy="look whether every rank was started, whether one has ended, and whether a firewall closes the port",
        ) from error


def _store(launch: Launch, timeout: timedelta) -> TCPStore:
    """One for all runs of this process: a model that FSDP has sharded keeps that of its run open, and so the port."""
    place = launch.address, launch.port
    if place not in _STORES:
        is_host = launch.rank == 0 and not launch.agent_has_store
        _STORES[place] = TCPStore(*place, launch.size, is_host, timeout, False)
    _STORES[place].set_timeout(timeout)
    return _STORES[place]
