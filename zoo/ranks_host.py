"""Runs programs on two ranks under ``tw.watch``, all in one pair of processes, and scores the doctor's findings.

python -m zoo.ranks_host '{"rank": 0, "port": 29512, "names": ["X01"], "seeds": [0], "folder": "/tmp/x"}'
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils.data import DataLoader, DistributedSampler

import trainwright as tw
from zoo.host import Rows, Watch, table

RANKS = 2
STEPS = 24
LIMIT_S = 6.0
"""The timeout of each program's process group: a collective that hangs fails after it."""
MEET_S = 60.0
"""How long the ranks wait for each other before a program: on a busy machine more than ``LIMIT_S`` may be needed."""
Program = Callable[[Watch, int, int], None]
"""``(watch, seed, rank)``: trains as one of two ranks."""


@dataclass(frozen=True)
class RankEntry:
    """One program. ``labels``: the accepted finding codes, empty for a healthy run; ``guilty``: the rank at fault.

    A finding has to name ``guilty``; None: which rank it names is not scored.
    """

    id: str
    labels: tuple[str, ...]
    run: Program
    guilty: int | None = None


RANK_ENTRIES: dict[str, RankEntry] = {}


def rank_fault(name: str, *labels: str, guilty: int | None = None) -> Callable[[Program], Program]:
    def register(run: Program) -> Program:
        assert name not in RANK_ENTRIES, name
        RANK_ENTRIES[name] = RankEntry(name, labels, run, guilty)
        return run

    return register


def healthy_ranks(name: str) -> Callable[[Program], Program]:
    """Registers a healthy run: on every rank the doctor may report only infos."""
    return rank_fault(name)


def net(dropout: float = 0.0, *, norm: bool = False) -> nn.Sequential:
    middle = nn.BatchNorm1d(32) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(20, 32), middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10))


def batches(seed: int, rank: int, *, n: int = 512, batch: int = 16, own: bool = True) -> DataLoader[Any]:
    """A loader of ``table``: of this rank's part if ``own``, else of everything, in the same order on all ranks."""
    data = Rows(*table(seed, n=n))
    if own:
        return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, RANKS, rank, seed=seed))
    return DataLoader(data, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(seed))


def run(entry: RankEntry, seed: int, rank: int, folder: Path, *, watched: bool = True) -> dict[str, Any]:
    """Runs the program once on this rank, without ``tw.watch`` if not ``watched``. Returns its findings as JSON."""
    torch.manual_seed(seed)
    watches: list[Any] = []
    models: list[nn.Module] = []

    def watch(*args: Any, **more: Any) -> Any:
        models.extend(args[0] if isinstance(args[0], list) else [args[0]])
        if not watched:
            return nullcontext()
        watches.append(tw.watch(*args, out=folder / f"{entry.id}-{seed}-{rank}", quiet=True, patience_s=3.0, **more))
        return watches[-1]

    begin_s, error = time.perf_counter(), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entry.run(watch, seed, rank)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    found = [each for one in watches for each in one.findings()]
    return {
        "id": entry.id,
        "seed": seed,
        "rank": rank,
        "found": [[f.code, f.severity, f.step, f.since_step, f.where.rank, f.symptom] for f in found],
        "failures": [each for one in watches for each in one.session.failures]
        + [f.symptom for f in found if f.code == "doctor.failed"],
        "error": error[:200],
        "bits": bits_of(models),
        "seconds": round(time.perf_counter() - begin_s, 2),
    }


def bits_of(models: list[nn.Module]) -> str:
    """A hash of all weights and buffers of this rank, of sharded ones the local shard."""
    tensors = [each for model in models for each in model.state_dict().values()]
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()[:16]


def main(ask: dict[str, Any]) -> None:
    """Prints one line of JSON for each program and seed. With ``compare`` each also runs without ``tw.watch``."""
    import zoo.ranks_apart  # noqa: F401  registers all entries

    logging.disable()
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", ask["port"], RANKS, ask["rank"] == 0, timedelta(seconds=MEET_S))
    for name in ask["names"] or sorted(RANK_ENTRIES):
        for seed in ask["seeds"]:
            told = one(ask, name, seed, store)
            if ask.get("compare"):
                told["bits_alone"] = one(ask, name, seed, store, watched=False)["bits"]
            sys.stdout.write(f"{json.dumps(told)}\n")
            sys.stdout.flush()
    store.set(f"done/{ask['rank']}", "")
    store.wait([f"done/{rank}" for rank in range(RANKS)])  # rank 0 serves the store, so it must exit last
    time.sleep(0.2 if ask["rank"] == 0 else 0)


def one(ask: dict[str, Any], name: str, seed: int, store: TCPStore, *, watched: bool = True) -> dict[str, Any]:
    """Runs one program in a new process group."""
    own = PrefixStore(f"{name}/{seed}/{watched}", store)
    own.set(f"here/{ask['rank']}", "")
    own.wait([f"here/{rank}" for rank in range(RANKS)])  # the other rank may still hang in the previous program
    limit = timedelta(seconds=ask.get("limit_s", LIMIT_S))
    meet = timedelta(seconds=MEET_S)
    distributed.init_process_group("gloo", store=own, rank=ask["rank"], world_size=RANKS, timeout=meet)
    distributed.barrier()
    _set_pg_timeout(limit)
    told = run(RANK_ENTRIES[name], seed, ask["rank"], Path(ask["folder"]), watched=watched)
    distributed.destroy_process_group()
    return told


def score(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The score of one program and seed. ``told``: what ``run`` returned on each rank.

    ``place``: position of the first accepted code among a rank's alarms, the best of both ranks.
    """
    entry = RANK_ENTRIES[told[0]["id"]]
    alarms = [[f for f in one["found"] if f[1] != "info"] for one in told]
    place = min((n for of_rank in alarms for n, f in enumerate(of_rank) if f[0] in entry.labels), default=None)
    named = [f[4] for of_rank in alarms for f in of_rank if f[0] in entry.labels]
    return {
        "id": entry.id,
        "seed": told[0]["seed"],
        "place": place,
        "on_ranks": sum(any(f[0] in entry.labels for f in of_rank) for of_rank in alarms),
        "guilty": None if entry.guilty is None else {each for each in named if each is not None} == {entry.guilty},
        "alarms": [[f[0] for f in of_rank] for of_rank in alarms],
        "failures": [each for one in told for each in one["failures"]],
        "errors": [one["error"][:80] for one in told],
        "seconds": max(one["seconds"] for one in told),
    }


if __name__ == "__main__":
    from zoo import ranks_host  # the programs register in this module; __main__ is a second copy of it

    ranks_host.main(json.loads(sys.argv[1]))
