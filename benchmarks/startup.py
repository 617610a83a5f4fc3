"""The time to start: the import, ``--help``, and the first step of a run, as wall time of a process.

    python -m benchmarks.startup [--quick]

``import`` and ``help`` are compared with ``python -c pass``. ``first_step`` is the time from the start of the process
to the end of its first optimizer step, compared with a plain torch script that trains the same model on the same data.
Before this step, Trainwright builds and plans the run, tries a step, and opens its log.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.figures import about, arguments, figure, interleaved, ratios, seconds_of
from benchmarks.processes import python

TINY = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))

def data():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 20, generator=draw), torch.randint(10, (256,), generator=draw)
    return torch.utils.data.TensorDataset(x, y)
"""

RECIPE = """
name: tiny
until: 1steps
model: tiny:model
data: {train: tiny:data}
batch: {size: 64}
"""

PLAIN = f"""
import time
{TINY}
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
x, y = next(iter(torch.utils.data.DataLoader(data(), batch_size=64, shuffle=True)))
loss = torch.nn.functional.cross_entropy(net(x), y)
loss.backward()
torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
optimizer.step()
print(time.time())
"""

Run = Callable[..., str]
"""Returns the stdout of ``python -c CODE ARGUMENTS``."""
OUR_COMMAND = "from trainwright.cli import main; main()"  # what the console script runs


def in_a_process(code: str, *arguments: str, threads: int, folder: Path, forks: bool) -> str:
    """Runs ``python -c code`` to its end. Returns its output."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if (bytecode := folder / "bytecode").exists():
        environ["PYTHONPYCACHEPREFIX"] = str(bytecode)
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode, too
    return python(["-c", code, *arguments], cwd=folder, env=environ, forks=forks)


def first_step_plain(run: Run) -> float:
    """Returns the seconds from the start of the process to the end of its first step."""
    begin_s = time.time()
    return float(run(PLAIN)) - begin_s


def first_step_ours(run: Run, folder: Path) -> float:
    """Like ``first_step_plain``, for ``trainwright train``, whose log has the time of the step."""
    begin_s = time.time()
    printed = run(OUR_COMMAND, "train", "tiny.yaml", "--json")
    log = folder / json.loads(printed.splitlines()[-1])["run"] / "log.jsonl"
    records = (json.loads(line) for line in log.read_text().splitlines())
    return float(next(record["time_s"] for record in records if record["kind"] == "step")) - begin_s


def against(case: str, ours: Sequence[float], theirs: Sequence[float], what: str) -> None:
    """Prints the difference in seconds and the ratio, each computed per round."""
    more = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    figure("startup", f"{case}_extra", more, unit="s", against=what)
    figure("startup", case, ratios(ours, theirs), unit="ratio", against=what)


def main() -> None:
    options = arguments(__doc__, rounds=(11, 1))
    about("startup")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny.py").write_text(TINY)
        (folder / "tiny.yaml").write_text(RECIPE)
        if not options.quick:
            (folder / "bytecode").mkdir()  # the uncounted round fills it
        run = partial(in_a_process, threads=options.threads, folder=folder, forks=options.quick)
        seconds = interleaved(
            {
                "bare": lambda: seconds_of(lambda: run("pass")),
                "import": lambda: seconds_of(lambda: run("import trainwright")),
                "help": lambda: seconds_of(lambda: run(OUR_COMMAND, "--help")),
                "first_step_plain": lambda: first_step_plain(run),
                "first_step": lambda: first_step_ours(run, folder),
            },
            options.rounds,
            uncounted=0 if options.quick else 1,
        )
    for case, values in seconds.items():
        figure("startup", f"{case}_seconds", values, unit="s", against="absolute")
    against("import", seconds["import"], seconds["bare"], "bare python")
    against("help", seconds["help"], seconds["bare"], "bare python")
    against("first_step", seconds["first_step"], seconds["first_step_plain"], "plain torch script")


if __name__ == "__main__":
    main()
