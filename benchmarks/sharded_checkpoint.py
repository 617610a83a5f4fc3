"""Checkpoints of a sharded model: memory of each rank during a save, and bytes that a rank reads in another layout.

    python -m benchmarks.sharded_checkpoint [--quick] [--ranks 4] [--parameters 50e6] [--moments 2]

Each rank holds its part of a stack of linear layers and of AdamW's moments (FSDP2 on gloo), copies it, and writes it.
The peak is the peak resident memory of the process from the copy to the commit, above that before the save. Then the
checkpoint is loaded into models of 1, 2 and 8 ranks. The figures are seconds, and the bytes that a rank reads. Every
loaded element is compared. ``gathered`` sends each tensor to rank 0 instead, which keeps a copy of all. With
``--moments 0``, weights are in bfloat16 without moments, and ``gathered`` is left out: --parameters 1e9 needs 8 GB.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.figures import about, arguments, figure
from trainwright.checkpoint.checkpoint import capture, load_checkpoint, tensors_of
from trainwright.checkpoint.sharded import ShardedSave
from trainwright.checkpoint.shards import locals_of, whole
from trainwright.checkpoint.staging import Staging
from trainwright.checkpoint.stored import StoredTensor
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import Ranks

WIDTH = 2048
STEP = 7


def main() -> None:
    options = arguments(__doc__, ranks=(4, 2), parameters=(50e6, 20e6), moments=(2, 2))
    about("sharded_checkpoint")
    layers = max(2, int(options.parameters) // WIDTH**2)
    size = Size(layers, bool(options.moments))
    state_bytes = layers * (WIDTH**2 + WIDTH) * (12 if size.has_moments else 2)
    saves = {"gathered": _gathered, "sharded": _sharded} if size.has_moments else {"sharded": _sharded}
    with tempfile.TemporaryDirectory() as folder:
        for name, save in saves.items():
            seen = _on_ranks(options.ranks, _saved, size, Path(folder), save)
            peaks = [each["peak"] / 2**20 for each in seen]
            figure("sharded_checkpoint", f"{name}_peak_first", peaks[:1], unit="MiB", against="before the save")
            figure("sharded_checkpoint", f"{name}_peak_others", peaks[1:], unit="MiB", against="before the save")
            ratio = peaks[0] / (sum(peaks[1:]) / len(peaks[1:]))
            figure("sharded_checkpoint", f"{name}_first_to_others", [ratio], unit="ratio", against="mean of the others")
            seconds = [max(each["seconds"] for each in seen)]
            figure("sharded_checkpoint", f"{name}_save", seconds, unit="s", against=f"{state_bytes / 1e9:.3g} GB")
        for ranks in (1, 2) if options.quick else (1, 2, 8):
            seen = _on_ranks(ranks, _loaded, size, Path(folder))
            read = [each["read"] / state_bytes for each in seen]
            figure("sharded_checkpoint", f"read_by_{ranks}", read, unit="share", against="of the state, by each rank")
            seconds = [max(each["seconds"] for each in seen)]
            figure("sharded_checkpoint", f"load_{ranks}", seconds, unit="s", against="the slowest rank")


def _on_ranks(count: int, work: Callable[..., dict[str, float]], *arguments: Any) -> list[dict[str, float]]:
    """Return the results of ``work`` on ``count`` new processes."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(count) as pool:
        store = f"file://{folder}/store"
        return pool.starmap(_rank, [(rank, count, store, work, arguments) for rank in range(count)], chunksize=1)


def _rank(
    rank: int, count: int, store: str, work: Callable[..., dict[str, float]], arguments: tuple[Any, ...]
) -> dict[str, float]:
    torch.set_num_threads(1)
    if count > 1:
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    found = work(*arguments)
    if count > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    return found


@dataclass(frozen=True)
class Size:
    """The number of layers, in float32 with AdamW's moments or in bfloat16 without."""

    layers: int
    has_moments: bool


def _state(size: Size, value: float) -> TrainState:
    """Returns a state in which layer i and its moments are ``value`` + i. No rank ever holds the full model."""
    dtype = torch.float32 if size.has_moments else torch.bfloat16
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(size.layers)))
    if distributed.is_initialized():
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
    with torch.no_grad():
        for index, layer in enumerate(model):
            for each in layer.parameters():
                each.fill_(value + index)
                if not size.has_moments:
                    continue
                moments = {"exp_avg": torch.empty_like(each), "exp_avg_sq": torch.empty_like(each)}
                for moment in moments.values():
                    moment.fill_(value + index)
                optimizer.state[each] = {"step": torch.tensor(1.0), **moments}
    return TrainState(model, optimizer, step=STEP)


def _saved(size: Size, folder: Path, save: Callable[[TrainState, Path], None]) -> dict[str, float]:
    state = _state(size, 1.0)
    _memory_bytes("VmHWM", reset=True)
    before = _memory_bytes("VmRSS")
    begin_s = time.perf_counter()
    save(state, folder)
    return {"peak": _memory_bytes("VmHWM") - before, "seconds": time.perf_counter() - begin_s}


def _sharded(state: TrainState, folder: Path) -> None:
    shards = ShardedSave(Ranks(), has_values=distributed.get_rank() == 0)
    part = shards.capture(state, folder, "", {}, lambda: None)
    shards.write(replace(part, tensors=Staging().copy(part.tensors)), folder)


def _gathered(state: TrainState, folder: Path) -> None:
    """Gathers each tensor on the first rank, which copies all. Nothing is written: the copy has the peak memory."""
    if distributed.get_rank() == 0:
        capture(state, Staging())
    else:
        for tensor in tensors_of(state).values():
            whole(tensor)


def _loaded(size: Size, folder: Path) -> dict[str, float]:
    state = _state(size, -1.0)
    read = 0
    original = StoredTensor.read

    def counted(self: StoredTensor, box: Any) -> torch.Tensor:
        nonlocal read
        found = original(self, box)
        read += found.nbytes
        return found

    StoredTensor.read = counted  # type: ignore[method-assign]
    begin_s = time.perf_counter()
    load_checkpoint(state, folder / f"step-{STEP:08d}", verified=True)
    seconds = time.perf_counter() - begin_s
    for index, layer in enumerate(state.model.children()):
        for each in layer.parameters():
            held = [each, *(own for own in state.optimizer.state.get(each, {}).values() if own.dim())]
            assert all(bool((part == 1.0 + index).all()) for part in locals_of(held)), "other values than saved"
    return {"read": read, "seconds": seconds}


def _memory_bytes(name: str, *, reset: bool = False) -> float:
    """Returns a value of /proc/self/status in bytes. ``reset``: sets the peak (VmHWM) to the present memory first."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
