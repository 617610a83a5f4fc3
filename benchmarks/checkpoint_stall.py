"""How long a checkpoint blocks training: Trainwright (``ours``), torch.save and torch.distributed.checkpoint.

    python -m benchmarks.checkpoint_stall [--quick] [--rounds 5] [--saves 3] [--device cpu] [--only torch_save,ours]

Checkpoints are written to TMPDIR. The state is GPT-2 with 124M parameters and the moments of AdamW: 1.49 GB. In each
round, each engine runs in a new process, and each round begins with another engine. The first save of a process is
``cold``: the engine has no buffer for its copy yet. It comes after 8 s of training, in which ours allocates the buffer;
``ours_at_once`` does not. Then come ``--saves`` warm saves, each after the previous one is on disk; the process reports
their median. During one more save, the process multiplies matrices, as a training would. By engine:

blocked        seconds until the call returned; ``blocked_ratio``: relative to torch.save in the same round
blocked_cold   the same for the first save
on_disk        seconds from the call until the checkpoint is complete; ``bytes_per_s`` is its size divided by this time
beside         speed of training while a checkpoint is written in the background, relative to the speed without
memory         peak memory of the process and its children during the first save, minus the memory before, in bytes

torch.save leaves its file in the page cache. The others wait for the disk (fsync). Ours also computes a sha256 of all
files and examines every tensor for non-finite values.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.figures import about, arguments, figure, ratios, seconds_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.models.gpt import gpt, gpt2
from trainwright.monitoring.saving import SavePolicy, Saving

BASELINE = "torch_save"
SAMPLE_S = 0.005
BEFORE_S = 8.0  # training time before the first save
MATRIX, ALONE = 512, 200  # size of the matrix product that simulates training; how often it is timed without a save


class Engine(Protocol):
    """Saves into a folder. ``stepped`` is called after each step before the first save. ``save`` blocks training.
    ``finished`` returns True when the checkpoint is complete."""

    def stepped(self, state: TrainState) -> None: ...
    def save(self, state: TrainState) -> None: ...
    def finished(self, state: TrainState) -> bool: ...
    def close(self) -> None: ...


class TorchSave:
    """One file, written while training waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stepped(self, state: TrainState) -> None: ...

    def save(self, state: TrainState) -> None:
        whole = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
        torch.save(whole, self.folder / f"step-{state.step}.pt")

    def finished(self, state: TrainState) -> bool:
        return True

    def close(self) -> None: ...


class Distributed:
    """torch.distributed.checkpoint. ``how``: arguments of async_save; None: a synchronous save."""

    def __init__(self, folder: Path, how: dict[str, Any] | None = None) -> None:
        self.folder, self.how = folder, how
        self.future: Any = None

    def stepped(self, state: TrainState) -> None: ...

    def save(self, state: TrainState) -> None:
        model, optimizer = get_state_dict(state.model, state.optimizer)
        whole, target = {"model": model, "optimizer": optimizer, "step": state.step}, self.folder / f"step-{state.step}"
        if self.how is None:
            save(whole, checkpoint_id=target, no_dist=True)
        else:
            self.future = async_save(whole, checkpoint_id=target, no_dist=True, **self.how)

    def finished(self, state: TrainState) -> bool:
        return self.future is None or self.future.done()

    def close(self) -> None:
        if self.future:
            self.future.result()  # raises an error of the save


class Ours:
    """The calls of the training loop between two steps. Without ``ahead``, no buffer is allocated before the save."""

    def __init__(self, folder: Path, *, asynchronous: bool, ahead: bool = True) -> None:
        policy = SavePolicy(asynchronous=asynchronous)
        self.saving, self.ahead = Saving(folder, policy, listener=self, warn=_fail), ahead
        self.told = 0

    def stepped(self, state: TrainState) -> None:
        if self.ahead:
            self.saving.due(state)

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None:
        self.told = step

    def not_saved(self, step: int, reason: str) -> None:
        _fail(reason)

    def save(self, state: TrainState) -> None:
        self.saving.due(state)
        self.saving(state)

    def finished(self, state: TrainState) -> bool:
        self.saving.due(state)
        return self.told == state.step

    def close(self) -> None:
        self.saving.close()


def _fail(text: str) -> None:
    raise SystemExit(text)


def kept_stager(*, shared: bool) -> DefaultStager:
    """Returns a stager that keeps its buffer between saves, as torch's documentation advises.

    Without a stager, async_save allocates a new buffer for each save.
    """
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
    )
    return DefaultStager(options)


def in_a_process(folder: Path) -> Engine:
    """Returns an engine whose writing process shares the memory of the copy. torch requires a process group for it."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    how = {"async_stager": kept_stager(shared=True), "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    return Distributed(folder, how)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    BASELINE: TorchSave,
    "dcp_save": Distributed,
    "dcp_async": lambda folder: Distributed(folder, {}),
    "dcp_async_kept": lambda folder: Distributed(folder, {"async_stager": kept_stager(shared=False)}),
    "dcp_async_process": in_a_process,
    "ours_sync": lambda folder: Ours(folder, asynchronous=False),
    "ours_at_once": lambda folder: Ours(folder, asynchronous=True, ahead=False),
    "ours": lambda folder: Ours(folder, asynchronous=True),
}


def make_state(quick: bool, device: str) -> TrainState:
    """Returns the state after one step with zero gradients, so that the moments exist."""
    torch.manual_seed(0)
    model = gpt(vocab_size=64, block_size=64, layers=2, heads=2, d_model=64) if quick else gpt2("124M")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model, optimizer, step=1)


class PeakMemory:
    """Context: a thread samples the memory of this process and its children. ``extra``: peak minus the start."""

    def __enter__(self) -> PeakMemory:
        self._process, self._over = psutil.Process(), threading.Event()
        self._before = self._most = self._bytes()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _bytes(self) -> int:
        total = self._process.memory_info().rss
        for child in self._process.children():
            with suppress(psutil.Error):  # the child has ended meanwhile
                seen = child.memory_info()
                total += seen.rss - seen.shared  # shared memory is counted for the parent
        return total

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._most = max(self._most, self._bytes())

    @property
    def extra(self) -> float:
        return float(self._most - self._before)


class Saves:
    """Saves by one engine, one after the other. Saves do not affect each other: older checkpoints are deleted before a
    save, and the disk is synchronized after it."""

    def __init__(self, engine: Engine, state: TrainState, folder: Path) -> None:
        self.engine, self.state, self.folder = engine, state, folder

    def save(self, meanwhile: Callable[[], object]) -> tuple[float, float, float | None]:
        """Returns the seconds that training waited, the seconds until the checkpoint was complete, and the calls of
        ``meanwhile`` per second in between; None without a call."""
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        self.state.step += 1
        begin_s, count = time.perf_counter(), 0
        self.engine.save(self.state)
        returned_s = time.perf_counter()
        while not self.engine.finished(self.state):
            meanwhile()
            count += 1
        done_s = time.perf_counter()
        os.sync()
        return returned_s - begin_s, done_s - begin_s, count / (done_s - returned_s) if count else None

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def measure(name: str, folder: Path, saves: int, quick: bool, device: str) -> dict[str, float | None]:
    """Measure one engine in this process."""
    state, matrix = make_state(quick, device), torch.randn(MATRIX, MATRIX, device=device)
    engine = ENGINES[name](folder)
    made = Saves(engine, state, folder)

    def idle() -> None:
        time.sleep(0.001)

    def train() -> None:
        torch.mm(matrix, matrix)
        if device != "cpu":
            torch.cuda.synchronize()  # else only the launch of the product would be timed

    with PeakMemory() as memory:
        end_s = time.perf_counter() + (0.1 if quick else BEFORE_S)
        while time.perf_counter() < end_s:
            train()
            engine.stepped(state)
        cold_s, _, _ = made.save(idle)
    warm = [made.save(idle)[:2] for _ in range(saves)]
    blocked_s, done_s = (statistics.median(values) for values in zip(*warm, strict=True))
    alone = [seconds_of(train) for _ in range(ALONE)]
    _, _, beside = made.save(train)
    alone += [seconds_of(train) for _ in range(ALONE)]
    engine.close()
    return {
        "blocked_cold": cold_s,
        "blocked": blocked_s,
        "on_disk": done_s,
        "bytes_per_s": made.bytes_on_disk() / done_s,
        "beside": beside * statistics.median(alone) if beside else None,
        "memory": memory.extra,
    }


UNITS = {"blocked_cold": "s", "blocked": "s", "on_disk": "s", "bytes_per_s": "B/s", "beside": "ratio", "memory": "B"}


def measure_here(name: str, folder: str, saves: int, quick: bool, threads: int, device: str) -> None:
    """Run one measurement in a separate process."""
    torch.set_num_threads(threads)
    print(json.dumps(measure(name, Path(folder), saves, quick, device)), flush=True)


def measured(name: str, options: argparse.Namespace) -> dict[str, float | None] | None:
    """Measures an engine in a new process and an empty folder. Prints the error and returns None if it fails."""
    with tempfile.TemporaryDirectory(prefix=f"stall-{name}-") as folder:
        how = f"{name!r}, {folder!r}, {options.saves}, {options.quick}, {options.threads}, {options.device!r}"
        command = [
            sys.executable,
            "-c",
            f"from benchmarks import checkpoint_stall; checkpoint_stall.measure_here({how})",
        ]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} failed ({done.returncode}): {done.stderr.strip()[-2000:]}", file=sys.stderr, flush=True)
        return None
    seen: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    return seen


def main() -> None:
    options = arguments(__doc__, rounds=(5, 1), saves=(3, 1), device=("cpu", "cpu"), only=("", ""))
    about("checkpoint_stall")
    names = [name for name in ENGINES if not options.only or name in (BASELINE, *options.only.split(","))]
    seen: dict[str, list[dict[str, float | None]]] = {name: [] for name in names}
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            one = measured(name, options)
            seen[name] += [one] if one else []
    for name, rounds in seen.items():
        for what, unit in UNITS.items():
            values = [value for each in rounds if (value := each[what]) is not None]
            figure("checkpoint_stall", f"{name}_{what}", values, unit=unit, against="absolute")
        if len(rounds) == len(seen[BASELINE]):
            waits = ([each["blocked"] or 0.0 for each in side] for side in (rounds, seen[BASELINE]))
            figure("checkpoint_stall", f"{name}_blocked_ratio", ratios(*waits), unit="ratio", against=BASELINE)


if __name__ == "__main__":
    main()
