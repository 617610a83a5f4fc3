"""A process with a memory limit of the kernel. Trains a step that is too large for the limit, and prints the outcome.

    python limited.py '{"model": "dropout", "micro": 64, "steps": 20, "limit_mib": 20}'

``limit_mib`` is the memory that it may allocate beyond what it holds after a warm-up step, or after step
``limit_after``, when the layer also becomes ``wider`` times as wide. Default: no limit. The wide layer keeps about half
a MiB per sample for its backward pass. With ``ranks``, it is one of several processes that meet in the file ``meet``.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

import trainwright as tw
from trainwright.checkpoint.rng import RngBag
from trainwright.checkpoint.store import newest_valid
from trainwright.distributed import SOLO, Ranks, World
from trainwright.distributed.memory import adapt_to_limits, give_back
from trainwright.engine.loop import for_steps, run
from trainwright.engine.rank_layout import RankLayout
from trainwright.errors import TrainwrightError

WIDE = 1024
BATCH, SMALL = 64, 4
SLACK_MIB = 4  # for Python's own allocations while the heap is filled
TAKEN: list[Tensor] = []  # fills the free parts of the heap. Never written, so it uses addresses but no pages.


class Wide(nn.Module):
    """x_BD -> x_BDW -> x_BD: large activations, few weights."""

    width = WIDE

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BDW = x_BD[:, :, None].expand(-1, -1, self.width) * torch.linspace(0.5, 1.5, self.width)
        return torch.tanh(x_BDW).mean(2)


class Hungry(nn.Module):
    """A model with large activations. ``kind`` selects additional behaviour; ``table`` is in no state_dict."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.wide, self.last = nn.Linear(64, 64), Wide(), nn.Linear(64, 4)
        self.heavy = nn.Linear(64, 64 * 1024, bias=False) if kind == "heavy" else None  # 16 MiB
        self.vector = nn.Parameter(torch.zeros(6 * 2**20)) if kind in ("vector", "later") else None  # 24 MiB
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.kind == "writes":
            x_BD.mul_(0.5)
        with torch.no_grad():
            self.table.add_(1)
        if self.heavy is not None:
            return self.last(self.first(x_BD)) + self.heavy(x_BD[:1]).mean()  # type: ignore[no-any-return]
        if self.vector is not None:
            x_BD = x_BD + self._of_vector(x_BD)
        x_BD = self.first(x_BD)
        if self.kind == "dropout":
            x_BD = F.dropout(x_BD, 0.3, self.training)
        return self.last(self.wide(x_BD))  # type: ignore[no-any-return]

    def _of_vector(self, x_BD: Tensor) -> Tensor | float:
        """``kind`` "later": used from the third step on. "vector": used at once; each pass leaves a cycle of 5 MiB."""
        assert self.vector is not None
        if self.kind == "later":
            return self.vector.sum() if float(self.table[0]) > 2 * BATCH / SMALL else 0.0
        held: list[object] = [torch.zeros(5 * 2**18)]
        held.append(held)
        return self.vector.sum()


def loss(model: nn.Module, batch: Any) -> tw.Loss:
    x_BD, target_B = batch["x"], batch["y"]
    return tw.Loss(F.cross_entropy(model(x_BD), target_B, reduction="sum"), float(len(target_B)))


def batches(micro: int, steps: int, *, first: int = 0) -> list[tw.StepBatch]:
    made = []
    for step in range(first, steps):
        draw = torch.Generator().manual_seed(step)
        x_BD, target_B = torch.randn(BATCH, 64, generator=draw), torch.randint(4, (BATCH,), generator=draw)
        cuts = [slice(at, at + micro) for at in range(0, BATCH, micro)]
        parts = [tw.MicroBatch({"x": x_BD[c].clone(), "y": target_B[c]}, np.arange(BATCH)[c]) for c in cuts]
        made.append(tw.StepBatch(tuple(parts), tw.Cursor(0, (step + 1) * BATCH)))
    return made


def limit_memory(mib: int) -> None:
    """Limits further allocations to ``mib``.

    The free parts of the heap would come on top of this limit and differ between machines. They are therefore allocated
    first, and large blocks no longer come from the heap.
    """
    give_back(torch.device("cpu"))
    set_limit(SLACK_MIB)
    adapt_to_limits()  # as every job under a limit does
    for size_mib in (64, 16, 4, SLACK_MIB // 2):
        with suppress(RuntimeError):
            while True:
                TAKEN.append(torch.empty(size_mib * 2**20, dtype=torch.uint8))
    set_limit(mib)


def set_limit(mib: int) -> None:
    """Sets the limit of the data segment to ``mib`` above its present size."""
    data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    most = int(data.split()[1]) * 1024 + mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def hashed(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()[:16]


class Listening:
    """Keeps losses and reports of memory shortages. Limits the memory after step ``limit_after``."""

    def __init__(self, limit_after: int | None = None, mib: int = 0, wider: int = 1) -> None:
        self.limit_after, self.mib, self.wider = limit_after, mib, wider
        self.shortages: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def observe(self, result: tw.StepResult, state: tw.TrainState) -> None:
        self.shortages += [vars(each) for each in result.oom_reports]
        self.losses.append(float(result.loss))
        if result.step == self.limit_after:
            limit_memory(self.mib)
            Wide.width = WIDE * self.wider

    def close(self) -> None: ...


class Saving:
    """Saves the state only when called or for a rescue, if there is a folder."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder

    def due(self, state: tw.TrainState) -> bool:
        return False

    def __call__(self, state: tw.TrainState) -> None:
        if self.folder:
            tw.save_checkpoint(state, self.folder)

    rescue = __call__

    def __exit__(self, *error: object) -> None: ...


def fit(ask: dict[str, Any]) -> dict[str, Any]:
    """A full run with doctor and log. The memory is limited after the second step."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(512, 64, generator=draw), torch.randint(4, (512,), generator=draw)
    settings = {"folder": ask["folder"], "log.every": "1step", "batch.size": BATCH, "log.sinks": []}
    heard = Listening(2, ask["limit_mib"])
    result = tw.fit(
        Hungry("dropout"),
        data,
        nn.CrossEntropyLoss(),
        until="4steps",
        observers=[heard],
        settings=settings,
        quiet=True,
    )
    return {"run": str(result.run), "ending": result.ending, "step": result.step, "shortages": heard.shortages}


def main(ask: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    gc.disable()
    kind, steps, micro = ask.get("model", "plain"), ask["steps"], ask.get("micro", BATCH)
    warm = tw.TrainState(model := Hungry("plain"), tw.make_optimizer("adamw", model, lr=1e-3))
    tw.make_step(loss)(warm, batches(2, 1)[0])  # loads threads, kernels and modules before the limit is set
    del warm, model
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    state = tw.TrainState(net := Hungry(kind), tw.make_optimizer("adamw", net, lr=1e-3, weight_decay=0.01))
    if ask.get("resume"):
        path, _ = newest_valid(Path(ask["resume"]))
        assert path is not None
        tw.load_checkpoint(state, path)
    data = batches(micro, steps, first=state.step)
    heard = Listening(ask.get("limit_after"), ask.get("limit_mib", 0), ask.get("wider", 1))
    world: World = SOLO
    if ask.get("ranks"):
        store = distributed.FileStore(ask["meet"], ask["ranks"])  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=ask["rank"], world_size=ask["ranks"])
        world = Ranks()
    if ask.get("limit_mib") and not heard.limit_after:
        limit_memory(ask["limit_mib"])
    error = ""
    try:
        advance, saving = tw.make_step(loss, ranks=RankLayout(world)), Saving(ask.get("save"))
        run(state, data, advance, until=for_steps(steps), observers=[heard], saving=saving, world=world)
    except TrainwrightError as raised:
        error = str(raised)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {
        "step": state.step,
        "micro_limit": state.micro_limit,
        "weights": hashed(*net.parameters()),
        "values": torch.cat([p.detach().flatten() for p in net.parameters()])[:200].double().tolist(),
        "buffers": hashed(*net.buffers()),
        "table": net.table.tolist(),
        "generators": hashed(RngBag.capture().torch_cpu) + hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": float(np.random.rand()),
        "losses": heard.losses,
        "shortages": heard.shortages,
        "error": error,
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(fit(asked) if "folder" in asked else main(asked)))
