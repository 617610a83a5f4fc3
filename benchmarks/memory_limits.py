"""The minimum memory for training: ``tw.fit`` compared with a plain loop that halves its micro-batch.

    python -m benchmarks.memory_limits [--quick] [--only gpt,mlp]

Each run is a process whose memory the kernel limits (RLIMIT_AS, RLIMIT_DATA) to that after its imports plus a number of
MiB. ``plain`` is a torch loop that halves its micro-batch and repeats the step after each out-of-memory error. ``fit``
is ``tw.fit`` with its defaults, including doctor and checkpoints. Both figures are the lowest limit under which it
trains; ``plain_unhalved`` is the lowest limit without halving. ``lost``: of ten limits between ``plain`` and
``plain_unhalved``, the number at which only the plain loop trains. ``at_N_MiB``: the final micro-batch of ``fit``, 0 if
it fails. ``imports``: the memory that ``import trainwright`` adds to that of torch with an optimizer.
"""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from benchmarks.figures import about, arguments, figure
from trainwright.models.gpt import gpt

LIMITS = {"as": (resource.RLIMIT_AS, "VmSize"), "data": (resource.RLIMIT_DATA, "VmData")}
BATCH, STEPS, VALUES = 32, 3, 10
PLAIN = "import torch; torch.optim.AdamW([torch.zeros(1, requires_grad=True)])"
MOST_MIB, NEAR_MIB, PRECISE_MIB = 512, 16, 4
VOCABULARY = 256


class Case(NamedTuple):
    """A model, its data, and its loss of (outputs, targets)."""

    model: nn.Module
    data: TensorDataset
    loss: Callable[[Tensor, Tensor], Tensor]


def mlp() -> Case:
    """Activations of 8 MiB per layer for a batch of 32 samples with 16 rows each; few weights."""
    layers = [nn.Linear(32, 4096), nn.Tanh(), nn.Linear(4096, 32), nn.ReLU()]
    again = [nn.Linear(32, 4096), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 4096, 4)]
    return Case(nn.Sequential(*layers, *again), _labelled(torch.randn(128, 16, 32), 4), nn.CrossEntropyLoss())


def conv() -> Case:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return Case(model, _labelled(torch.randn(128, 3, 32, 32), 10), nn.CrossEntropyLoss())


def small_gpt() -> Case:
    """A GPT with two layers of width 128 and 128 positions."""
    model = gpt(vocab_size=VOCABULARY, block_size=128, layers=2, heads=4, d_model=128)
    ids = torch.randint(VOCABULARY, (128, 129))
    return Case(model, TensorDataset(ids[:, :-1].clone(), ids[:, 1:].clone()), of_tokens)


def of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _labelled(inputs: Tensor, classes: int) -> TensorDataset:
    return TensorDataset(inputs, torch.randint(classes, (len(inputs),)))


CASES = {"mlp": mlp, "conv": conv, "gpt": small_gpt}


def plain(case: Case) -> int:
    """Trains in the plain loop. Returns the final micro-batch."""
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    micro = BATCH
    for x, y in islice(DataLoader(case.data, batch_size=BATCH, shuffle=True), STEPS):
        while True:
            try:
                optimizer.zero_grad()
                for inputs, targets in zip(x.split(micro), y.split(micro), strict=True):
                    (case.loss(case.model(inputs), targets) * len(inputs) / len(x)).backward()
                nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
                optimizer.step()
                break
            except (RuntimeError, MemoryError) as error:
                if micro == 1 or not (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
                    raise
            micro //= 2
    return micro


def fit(case: Case) -> int:
    """Trains with ``tw.fit``, whose default batch is 32. Returns the final micro-batch."""
    with tempfile.TemporaryDirectory() as folder:
        until = f"{STEPS}steps"
        done = tw.fit(case.model, case.data, case.loss, until=until, clip=1.0, settings={"folder": folder}, quiet=True)
    assert done.state is not None and done.step == STEPS
    return done.state.micro_limit or BATCH


SIDES = {"plain": plain, "fit": fit}


def held_mib(name: str) -> float:
    """Returns a value of /proc/self/status in MiB."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) / 1024


def limited(side: str, case: str, kind: str, mib: int, threads: int, answer: Path) -> None:
    """Runs one side in this process. Writes the final micro-batch into the file ``answer``, or nothing if it fails."""
    which, name = LIMITS[kind]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sys.stderr = Path("/dev/null").open("w")  # noqa: SIM115  it lives as long as the process
    most = int((held_mib(name) + mib) * 2**20)
    resource.setrlimit(which, (most, resource.RLIM_INFINITY))
    micro = SIDES[side](CASES[case]())
    resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    answer.write_text(str(micro))


class Sweep:
    """The runs of one model under one kind of limit. ``known`` has their micro-batches; None: the run failed."""

    def __init__(self, case: str, kind: str, threads: int, precise: int) -> None:
        self.case, self.kind, self.threads, self.precise = case, kind, threads, precise
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(
            ["benchmarks.memory_limits", "trainwright.training.run", "trainwright.training.fit"]
        )
        self.known: dict[tuple[str, int], int | None] = {}

    def micro(self, side: str, mib: int) -> int | None:
        if (side, mib) not in self.known:
            with tempfile.TemporaryDirectory() as folder:
                answer = Path(folder) / "micro"
                ask = (side, self.case, self.kind, mib, self.threads, answer)
                process = self._processes.Process(target=limited, args=ask)
                process.start()
                process.join()
                self.known[side, mib] = int(answer.read_text()) if answer.exists() else None
        return self.known[side, mib]

    def least(self, side: str, *, micro: int = 1, above: int = 0) -> int:
        """Returns the lowest limit in MiB at which ``side`` trains with a micro-batch of at least ``micro``.

        Found by bisection, near ``above`` if that is set.
        """
        low, high = max(0, above - NEAR_MIB), above + 2 * NEAR_MIB if above else MOST_MIB
        while high - low > self.precise:
            middle = (low + high) // 2
            if (self.micro(side, middle) or 0) >= micro:
                high = middle
            else:
                low = middle
        return high


def imports_mib(name: str) -> float:
    """Return the MiB that importing Trainwright's training adds to the memory of torch with an optimizer."""
    read = f"print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('{name}')))"
    kib = [
        int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for code in (f"{PLAIN}; {read}", f"{PLAIN}; import trainwright.training.run; {read}")
    ]
    return (kib[1] - kib[0]) / 1024


def sweep(case: str, kind: str, threads: int, values: int, precise: int) -> None:
    runs = Sweep(case, kind, threads, precise)
    name = f"{case}/{kind}"
    edge, ample = runs.least("plain"), runs.least("plain", micro=BATCH)
    ours = runs.least("fit", above=edge)
    figure("memory_limits", f"{name}/plain", [edge], unit="MiB", against="after the imports")
    figure("memory_limits", f"{name}/plain_unhalved", [ample], unit="MiB", against="after the imports")
    figure("memory_limits", f"{name}/fit", [ours], unit="MiB", against="after the imports")
    limits = sorted({edge + (ample - edge) * number // (values - 1) for number in range(values)})
    rows = [(mib, runs.micro("plain", mib), runs.micro("fit", mib)) for mib in limits]
    for mib, theirs, mine in rows:
        figure("memory_limits", f"{name}/at_{mib}_MiB", [mine or 0], unit="samples", against=f"plain {theirs or 0}")
    lost = [mib for mib, theirs, mine in rows if theirs and not mine]
    figure("memory_limits", f"{name}/lost", [len(lost)], unit="limits", against=f"{len(rows)} limits")


def main() -> None:
    options = arguments(__doc__, values=(VALUES, 2), precise=(PRECISE_MIB, 256), only=("", ""))
    about("memory_limits")
    for kind, (_, name) in LIMITS.items():
        figure("memory_limits", f"imports/{kind}", [imports_mib(name)], unit="MiB", against="torch with an optimizer")
    for case in CASES if not options.only else options.only.split(","):
        for kind in LIMITS:
            sweep(case, kind, options.threads, options.values, options.precise)


if __name__ == "__main__":
    main()
