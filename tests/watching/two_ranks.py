"""One of two processes that train together. Runs small programs, unwatched and watched, and prints the outcomes.

    python two_ranks.py '{"rank": 0, "meet": "/tmp/x/meet", "folder": "/tmp/x", "programs": ["healthy"], "seeds": [1]}'

With an even seed, both ranks are watched. With an odd seed, only the first is, and the second is slower.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainwright as tw
from trainwright.recorder.ranks import num_collectives

STEPS, RANKS = 14, 2


class CommunicatesInEvaluation(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.training:
            distributed.all_reduce(out.detach())
        return out


def net(program: str) -> nn.Sequential:
    last = CommunicatesInEvaluation(16, 4) if program == "asymmetric" else nn.Linear(16, 4)
    norm = nn.BatchNorm1d(16) if program in ("healthy", "nan", "first_batches_alone") else nn.Identity()
    return nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Dropout(0.1), last)


def prepared(program: str, inner: nn.Module) -> nn.Module:
    if program == "sharded":
        fully_shard(inner, mesh=init_device_mesh("cpu", (RANKS,)))
    is_plain = program in ("sharded", "asymmetric", "softmax_by_hand")
    return inner if is_plain else DistributedDataParallel(inner)


def batches(loader: DataLoader[Any], epochs: int) -> Iterator[Any]:
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def train(program: str, seed: int, rank: int, watching: Callable[..., Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    x, y = torch.randn(224, 8), torch.randint(0, 4, (224,))
    if program == "nan":
        x[37] = float("nan")
    model = prepared(program, inner := net(program))
    kind = torch.optim.SGD if program == "no_zero_grad" else torch.optim.AdamW
    if program == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), kind, lr=1e-3)
    else:
        optimizer = kind(model.parameters(), lr=1e-2)
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, RANKS, rank, seed=seed))
    average = [p.detach().clone() for p in model.parameters()] if program == "sharded" else []
    with watching(inner if program == "inside" else model, optimizer, loader=loader) as watch:
        for number, (rows, target) in enumerate(batches(loader, 3 if average else 1)):
            if average:  # an average of sharded weights, over enough steps to be found; zero_grad() after the forward
                loss = F.cross_entropy(model(rows), target)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
                continue
            if program != "no_zero_grad":
                optimizer.zero_grad()
            is_alone = program == "first_batches_alone" and number < 5
            with model.no_sync() if is_alone else nullcontext():  # type: ignore[operator]
                out = model(rows)
                F.cross_entropy(out.softmax(1) if program.startswith("softmax") else out, target).backward()
            for p in model.parameters() if program == "softmax_by_hand" else ():
                distributed.all_reduce(p.grad)
            optimizer.step()
            time.sleep(0.002 if rank and seed % 2 else 0)
    return inner, watch


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach()


def outcome(ask: dict[str, Any], program: str, seed: int, is_watched: bool) -> dict[str, Any]:
    rank = ask["rank"]
    watched = is_watched and (seed % 2 == 0 or rank == 0)
    out = f"{ask['folder']}/{program}-{seed}-{rank}"
    begun = num_collectives()
    model, watch = train(
        program,
        seed,
        rank,
        (lambda *args, **more: tw.watch(*args, out=out, quiet=True, **more))
        if watched
        else lambda *_, **__: nullcontext(),
    )
    said = hashlib.sha256(b"".join(whole(p).numpy().tobytes() for p in model.state_dict().values())).hexdigest()[:16]
    facts: dict[str, Any] = {
        "program": program,
        "seed": seed,
        "weights": said,
        "collectives": num_collectives() - begun,
    }
    if watched:
        facts |= {
            "codes": {found.code: found.symptom for found in watch.findings()},
            "tried": [found.code for found in watch.findings() if found.tried],
            "failures": watch.session.failures,
            "blind": sorted({r.values["blind"] for r in watch.records if "blind" in getattr(r, "values", ())}),
        }
    return facts


def main(ask: dict[str, Any]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    store = distributed.FileStore(ask["meet"], RANKS)  # type: ignore[attr-defined]
    limit = timedelta(seconds=40)
    distributed.init_process_group("gloo", store=store, rank=ask["rank"], world_size=RANKS, timeout=limit)
    every = [(program, seed) for program in ask["programs"] for seed in ask["seeds"]]
    outcomes = [outcome(ask, *each, is_watched) for each in every for is_watched in (False, True)]
    distributed.destroy_process_group()
    return outcomes


def print_outcomes(asked: str) -> None:
    print(json.dumps(main(json.loads(asked))))


if __name__ == "__main__":
    print_outcomes(sys.argv[1])
