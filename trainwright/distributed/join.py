"""Joins the other processes of a run, as torchrun or Ray Train describes them in the environment."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainwright.distributed.group import SOLO, Ranks, World, is_of_exchange, lost_rank, waiting_s
from trainwright.distributed.threads import small_stacks
from trainwright.errors import RankError, UsageError, text_of

HUNG_AFTER_S = 5.0
"""Time in an exchange after which a rank ends if another rank has reported that it failed."""
LOST = "lost"
"""The key in the store under which a rank reports that it failed."""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """Launch of this process by torchrun or Ray Train.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        local_rank: Number of this process on its machine.
        attempt: Number of restarts.
        job: Id of the launch, the same for all attempts: the run id of torchrun, the name of the run of Ray Train, or
            host and process id of torchrun if it has no run id.
        address: Address of the store.
        port: Port of the store.
        agent_has_store: True if torchrun hosts the store.
        call: Number of the run in a script that trains several times.
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
        """Return the launch described by torchrun, also with one rank; without a launch, a single process.

        Raises:
            UsageError: The environment has several ranks, but not how to connect to them.
        """
        missing = [name for name in _NAMES if name not in environ]
        is_one = environ.get("WORLD_SIZE", "1") == "1"
        job = environ.get("TORCHELASTIC_RUN_ID") or _run_of_ray()
        if "LOCAL_RANK" in missing or (is_one and (missing or not job)):
            return cls()  # a job of Slurm or MPI with one task also sets WORLD_SIZE
        numbers = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        wrong = [f"{name}={value}" for name, value in numbers.items() if not value.isdecimal()]
        if missing or wrong:
            raise UsageError(
                f"the environment has several ranks, but {', '.join([*missing, *wrong])} is missing or no number",
                remedy="start it with torchrun: trainwright train RECIPE -- --nproc-per-node 2",
            )
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


def _run_of_ray() -> str:
    """Return ``ray:`` and the name of the Ray Train run of this worker, which a restart keeps; "" outside of Ray."""
    if "ray.train" in sys.modules:
        from ray import train

        with suppress(RuntimeError):  # raised in a process that is no worker
            name = train.get_context().get_experiment_name()
            return f"ray:{name}" if name else ""
    return ""


ALONE = Launch()
_CALLS = itertools.count()
_STORES: dict[tuple[str, int], TCPStore] = {}


@contextmanager
def joined(launch: Launch, timeout_s: float, *, on_gpu: bool = False) -> Iterator[World]:
    """Context with the World of this process: SOLO, or the ranks once all have joined. Leaves the group at the end.

    A group that the caller has initialized is used, and not destroyed. ``timeout_s`` is the maximum wait for other
    ranks.

    Raises:
        RankError: The other ranks do not join.
        UsageError: There are fewer GPUs than ranks on this machine, or the group of the caller has no CPU backend.
    """
    on_gpu = on_gpu and torch.cuda.is_available()
    if on_gpu and launch.local_rank >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"rank {launch.rank} is number {launch.local_rank} (from 0) of its machine, which has {count} GPUs",
            remedy="start as many processes as there are GPUs (--nproc-per-node gpu), or set device: cpu",
        )
    if distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            _require_cpu_backend()
            yield Ranks()
        else:
            yield SOLO
        return
    if launch.size == 1:
        yield SOLO
        return
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    store = _open(launch, timedelta(seconds=timeout_s), "cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    over = Event()
    with small_stacks():
        Thread(target=_end_if_hung, args=(store, over, launch), name="hung", daemon=True).start()
    try:
        yield Ranks()
    except BaseException as error:
        with suppress(RuntimeError):  # the rank that hosts the store may be the lost one
            store.set(LOST, "")
        if isinstance(error, RuntimeError) and is_of_exchange(error):
            raise lost_rank("exchange weights or gradients", error) from error
        raise
    finally:
        over.set()
        if distributed.is_initialized():  # a wrapper that restarts this function in the process has ended the group
            distributed.destroy_process_group()


def _end_if_hung(store: Store, over: Event, launch: Launch) -> None:
    """End this process if an exchange does not return after another rank was lost.

    If a connection is reset in the middle of a message, gloo may wait until the timeout. Then no exception can be
    raised here, and torchrun kills the process only after 30 s.
    """
    while not over.wait(HUNG_AFTER_S / 5):
        if waiting_s() < HUNG_AFTER_S:
            continue
        try:
            is_lost = store.check([LOST])
        except RuntimeError:  # the store has gone with rank 0, unless torchrun hosts it
            is_lost = not launch.agent_has_store
        if is_lost and not over.is_set():
            sys.stderr.write(
                f"error: rank {launch.rank} waits for another rank, which has ended or lost the connection\n"
                "  remedy: the output of the other rank says why; then resume the run\n"
            )
            sys.stderr.flush()
            os._exit(1)


def _require_cpu_backend() -> None:
    backends = distributed.get_backend_config()
    if "cpu:" not in backends:
        raise UsageError(
            f"the process group has no backend for tensors of the CPU: {backends}",
            remedy='initialize it with backend="cpu:gloo,cuda:nccl"; with Ray Train: TorchTrainer(..., '
            'torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl"))',
        )


def _open(launch: Launch, timeout: timedelta, backend: str) -> Store:
    """Initialize the group with a separate store for this call: torchrun's may still contain addresses of earlier ones.

    Keys contain the number of the attempt only if torchrun hosts the store. Any other store is new at each attempt, and
    the agent of a restarted node does not know that number.
    """
    try:
        attempt = launch.attempt if launch.agent_has_store else 0
        own = PrefixStore(f"trainwright/{attempt}/{launch.call}", _store(launch, timeout))
        distributed.init_process_group(backend, store=own, rank=launch.rank, world_size=launch.size, timeout=timeout)
        return own
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {launch.rank} could not connect to the other {launch.size - 1} at {launch.address}:{launch.port}: "
            f"{text_of(error)[:300]}",
            remedy="check that every rank was started, that none has ended, and that no firewall blocks the port",
        ) from error


def _store(launch: Launch, timeout: timedelta) -> TCPStore:
    """Return the store that all runs of this process share: an FSDP model keeps its store open, and thus the port."""
    place = launch.address, launch.port
    if place not in _STORES:
        is_host = launch.rank == 0 and not launch.agent_has_store
        _STORES[place] = TCPStore(*place, launch.size, is_host, timeout, False)
    _STORES[place].set_timeout(timeout)
    return _STORES[place]
