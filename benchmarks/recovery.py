"""Measures the time from a fault to the next completed step, by phase, and compares the run with one without faults.

    python -m benchmarks.recovery [--kills 20] [--ranks 2,4] [--faults rank,agent,link] [--times FILE]

A small model trains with `trainwright train RECIPE -- --nproc-per-node N` and saves after each step. Faults:

rank: SIGKILL of a random rank. Its torchrun starts all ranks again.
agent: two torchruns with half of the ranks each, as on two machines. SIGKILL of the torchrun that does not host the
rendezvous. It is started again at once, as by a scheduler.
link: two torchruns. All connections between their ranks are reset (`ss --kill`, in a network namespace). No process is
killed, and the rendezvous stays reachable.

Phases: detect, until the last old rank has ended; rendezvous, until all new ranks exist; load, until the run has
started again (imports, connections, plan, checkpoint); first_step, until the next step is in the log. After each
fault all committed checkpoints must verify and have the bits of an undisturbed run. At the end of a run its log must
have the same losses and samples, each step once. `problems` counts the differences, and must be 0.

With --times, each recovery is appended to a file. A later call with that file continues from these recoveries.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import about, arguments, figure
from benchmarks.kill_campaign import KEEP, Reference, compare, inspect, train_undisturbed
from benchmarks.killable import Place, Running
from benchmarks.pairs import free_port

PHASES = ("detect", "rendezvous", "load", "first_step")
LIMIT_S = 120.0
POLL_S = 0.005
STEP_MS = 20.0
STEPS_BETWEEN = (3, 6)
"""Completed steps between a recovery and the next fault."""
INSIDE = "RECOVERY_IN_NAMESPACE"


class Launched:
    """The torchruns of one run, and the ranks that they have started."""

    def __init__(self, words: Sequence[str], place: Place, ranks: int, nodes: int) -> None:
        self._words, self._place, self._each, self._nodes = [*words], place, ranks // nodes, nodes
        self._rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "recovery", "--local-addr", "127.0.0.1"]
        self._rendezvous += ["--nnodes", str(nodes), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        self.agents = [self._start(number) for number in range(nodes)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        options = ["--nproc-per-node", str(self._each), "--max-restarts", "1000"]
        if self._nodes > 1:
            options += [*self._rendezvous, "--rdzv-conf", f"is_host={str(number == 0).lower()}"]
        command = [sys.executable, "-m", "trainwright", *self._words, "--", *options]
        with self._place.said.with_suffix(f".{number}.txt").open("ab") as said:
            return subprocess.Popen(command, cwd=self._place.folder, stdout=said, stderr=subprocess.STDOUT)

    def ranks(self, number: int) -> list[psutil.Process]:
        """Returns the running ranks of a torchrun: forked by its fork server, or its children."""
        with suppress(psutil.Error):
            children = psutil.Process(self.agents[number].pid).children()
            servers = [each for each in children if "multiprocessing.forkserver" in " ".join(each.cmdline())]
            ranks = [rank for server in servers for rank in server.children()]
            return ranks or [each for each in children if "multiprocessing" not in " ".join(each.cmdline())]
        return []

    def all_ranks(self) -> list[psutil.Process]:
        return [rank for number in range(self._nodes) for rank in self.ranks(number)]

    @property
    def expected(self) -> int:
        return self._each * self._nodes

    def kill_rank(self) -> None:
        random.choice(self.all_ranks()).kill()

    def kill_agent(self) -> None:
        self.agents[-1].kill()
        self.agents[-1].wait()
        self.agents[-1] = self._start(self._nodes - 1)

    def cut(self) -> None:
        """Reset all connections between ranks of the two torchruns."""
        first, second = (ports_of(self.ranks(number)) for number in (0, 1))
        for port, peer in first.items():
            if peer in second:
                words = ["ss", "--kill", "--tcp", "sport", "=", str(port), "dport", "=", str(peer)]
                subprocess.run(words, check=True, capture_output=True)

    def poll(self) -> int | None:
        codes = [each.poll() for each in self.agents]
        return None if None in codes else max(abs(code) for code in codes if code is not None)

    def wait(self) -> int:
        return max(abs(each.wait()) for each in self.agents)

    def kill(self) -> None:
        """Kill the torchruns. Their ranks then end as well."""
        for each in self.agents:
            each.kill()

    def said(self) -> str:
        paths = sorted(self._place.folder.glob(f"{self._place.said.stem}.*.txt"))
        return "\n".join(path.read_text()[-3000:] for path in paths)


def ports_of(ranks: Sequence[psutil.Process]) -> dict[int, int]:
    """Return the remote port by local port for the established connections of these processes."""
    found = [each for rank in ranks for each in rank.net_connections("tcp") if each.status == "ESTABLISHED"]
    return {each.laddr.port: each.raddr.port for each in found}


FAULTS: dict[str, Callable[[Launched], None]] = {
    "rank": Launched.kill_rank,
    "agent": Launched.kill_agent,
    "link": Launched.cut,
}


@dataclass
class TorchrunPlace(Place):
    """A place in which one torchrun per node, ``nodes`` in all, trains a run."""

    nodes: int = 1

    def _start(self, *arguments: str) -> Running:
        return Launched(arguments, self, self.ranks, self.nodes)


class Log:
    """Follows the log of a run: its records since the last call of ``begin``."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.records: list[dict[str, Any]] = []

    def begin(self) -> None:
        self.follow()
        self.records = []

    def follow(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as log:
            log.seek(self._read)
            *lines, _unfinished = log.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in lines)
        self.records += map(json.loads, filter(None, lines))

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps since the newest start of the run; [] if it has not started since ``begin``."""
        self.follow()
        starts = [index for index, each in enumerate(self.records) if each["kind"] == "started"]
        return [each for each in self.records[starts[-1] :] if each["kind"] == "step"] if starts else []

    def has_steps(self, number: int) -> bool:
        return len(self.steps()) >= number


class History:
    """Recoveries and problems by case, of this call and of earlier calls with the same file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.times: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
        self.loads: defaultdict[str, list[float]] = defaultdict(list)
        self.problems: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for line in path.read_text().splitlines() if path and path.exists() else ():
            self._read(json.loads(line))

    def add(self, case: str, **what: dict[str, float] | dict[str, int]) -> None:
        entry = {"case": case, "load": os.getloadavg()[0], **what}
        self._read(entry)
        if self._path:
            with self._path.open("a") as file:
                print(json.dumps(entry), file=file)

    def _read(self, entry: dict[str, Any]) -> None:
        if "times" in entry:
            self.times[entry["case"]].append(entry["times"])
            self.loads[entry["case"]].append(entry["load"])
        self.problems[entry["case"]].update(entry.get("problems", {}))


@dataclass
class Session:
    """Faults of one kind with one number of ranks, in as many runs as are needed."""

    fault: str
    place: TorchrunPlace
    reference: Reference
    history: History
    runs: int = 0

    @property
    def times(self) -> list[dict[str, float]]:
        return self.history.times[self.case]

    @property
    def case(self) -> str:
        return f"{self.fault}_{self.place.ranks}"

    def conduct(self, faults: int) -> None:
        while len(self.times) < faults:
            name = f"{self.fault}-{self.runs}"
            launched = self.place.train(name)
            assert isinstance(launched, Launched)
            try:
                self._run_to_end(launched, name, faults)
            finally:
                if launched.poll() is None:
                    launched.kill()
                    launched.wait()
            self.runs += 1

    def _run_to_end(self, launched: Launched, name: str, faults: int) -> None:
        run, last = self.place.run(name), len(self.reference.steps)
        log = Log(run / "log.jsonl")
        while len(self.times) < faults:
            wait_for(partial(log.has_steps, random.randint(*STEPS_BETWEEN)), launched)
            if log.steps()[-1]["step"] > last - 2 * STEPS_BETWEEN[1]:
                break
            self.history.add(self.case, times=self._strike(launched, run, log))
        code = launched.wait()
        if code:
            raise SystemExit(f"the run ended with {code}:\n{launched.said()}")
        self._count(compare(run, self.reference).problems())

    def _strike(self, launched: Launched, run: Path, log: Log) -> dict[str, float]:
        """Cause a fault and return the phases of the recovery in seconds."""
        old = launched.all_ranks()
        log.begin()
        begin_s = time.time()
        FAULTS[self.fault](launched)
        wait_for(lambda: not any(map(is_alive, old)), launched)
        ended_s = time.time()
        self._count(inspect(run, self.reference).problems())
        wait_for(lambda: len(set(launched.all_ranks()) - set(old)) == launched.expected, launched)
        exist_s = time.time()
        wait_for(partial(log.has_steps, 1), launched)
        started = [each for each in log.records if each["kind"] == "started"]
        at = [begin_s, ended_s, exist_s, started[-1]["time_s"], log.steps()[0]["time_s"]]
        return {name: end - begin for name, begin, end in zip(PHASES, at, at[1:], strict=False)}

    def _count(self, found: dict[str, int]) -> None:
        if found:
            self.history.add(self.case, problems=found)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition: Callable[[], bool], launched: Launched) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s or launched.poll() is not None:
            raise SystemExit(f"the run did not continue:\n{launched.said()}")
        time.sleep(POLL_S)


def show(session: Session) -> None:
    case, times, loads = session.case, session.times, session.history.loads[session.case]
    against = f"{len(times)} faults on {os.cpu_count()} cores"
    figure("recovery", f"{case}_total", [sum(each.values()) for each in times], unit="s", against=against)
    for phase in PHASES:
        figure("recovery", f"{case}_{phase}", [each[phase] for each in times], unit="s", against="absolute")
    figure("recovery", f"{case}_machine_load", loads, unit="processes", against="absolute; running on the machine")
    problems = session.history.problems[case]
    figure("recovery", f"{case}_problems", [problems.total()], unit="count", against="absolute")
    if problems:
        print(f"{case}: {dict(problems)}", file=sys.stderr)


def in_namespace() -> bool:
    """Start this program again in a network namespace. Returns False if namespaces are not allowed."""
    words = ["unshare", "-Urn", "sh", "-c"]
    with suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*words, "ip link set lo up && ss -K dport = 1"], check=True, capture_output=True)
        again = [sys.executable, "-m", "benchmarks.recovery", *sys.argv[1:]]
        os.execvpe("unshare", [*words, 'ip link set lo up && exec "$@"', "sh", *again], {**os.environ, INSIDE: "1"})
    return False


def main() -> None:
    options = arguments(
        __doc__, kills=(20, 1), ranks=("2,4", "2"), faults=("rank,agent,link", "rank"), seed=(0, 0), times=("", "")
    )
    faults = options.faults.split(",")
    if "link" in faults and INSIDE not in os.environ and not in_namespace():
        print("network namespaces are not allowed here: the fault link is skipped", file=sys.stderr)
        faults.remove("link")
    history = History(Path(options.times) if options.times else None)
    random.seed(options.seed + sum(map(len, history.times.values())))
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a restarted torchrun would compile all modules again
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the figures so far are printed
    about("recovery")
    steps = min(160, 30 + options.kills * 2 * STEPS_BETWEEN[1])
    for ranks in map(int, options.ranks.split(",")):
        folder, reference = Path(tempfile.mkdtemp(prefix="recovery-")).resolve(), None
        for fault in faults:
            place = TorchrunPlace(folder / fault, ranks=ranks, nodes=1 if fault == "rank" else 2)
            place.make(steps=steps, workers=0, step_ms=STEP_MS, keep=KEEP)
            reference = reference or train_undisturbed(place, steps)
            session = Session(fault, place, reference, history)
            try:
                session.conduct(options.kills)
            finally:
                show(session)
        if any(history.problems.values()):
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    sys.exit(any(history.problems.values()))


if __name__ == "__main__":
    main()
