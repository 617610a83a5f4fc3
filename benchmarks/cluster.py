"""A simulated cluster: two "nodes" with two ranks each, in separate network namespaces, connected by a slow link.

    python -m benchmarks.cluster [--mbit 100]

launch: a run of four ranks ends normally. kill: all processes of a node are killed during the run, the node is started
again, and the run ends with the bits of the undisturbed run. slow: the data of one node are slow, and the doctor names
its ranks and its machine. The benchmark is skipped if namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from trainwright.checkpoint.weights import read_weights

NODES = (0, 1)
MODULE = """
import os, time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(float(os.environ.get("READ_S", "0.002")))
        return torch.randn(8) + index % 3, index % 3
"""
RECIPE = """
until: 60steps
model: {use: mlp, args: {sizes: [8, 16, 3], dropout: 0.3}}
data: {train: "slow:Slow"}
batch: {size: 16}
precision: fp32
checkpoint: {every: 5steps, at_least_every: null}
log: {every: 1steps}
"""
LIMIT_S = 120.0


class Node:
    """One machine: namespaces for its network and host name, kept alive by a sleeping process."""

    def __init__(self, number: int, cwd: Path) -> None:
        self.number, self._cwd = number, cwd
        self._holder = subprocess.Popen(["unshare", "-nu", "sleep", "infinity"])
        self.pid = self._holder.pid
        while network_of(self.pid) == network_of("self"):
            time.sleep(0.01)

    @property
    def address(self) -> str:
        return f"10.9.0.{self.number + 1}"

    def inside(self, *words: str) -> list[str]:
        """Returns the command that runs ``words`` on this node."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", *words]

    def set_up(self, mbit: int) -> None:
        """Sets host name, address, and a link with a bandwidth of ``mbit`` Mbit/s."""
        for words in (
            f"hostname node{self.number}",
            "ip link set lo up",
            f"ip addr add {self.address}/24 dev v{self.number}",
            f"ip link set v{self.number} up",
            f"tc qdisc add dev v{self.number} root tbf rate {mbit}mbit burst 64kb latency 50ms",
        ):
            subprocess.run(self.inside(*words.split()), check=True)

    def train(self, name: str, **environ: str) -> subprocess.Popen[bytes]:
        """Starts the two ranks of this node in the run ``name`` with the command that a user would use."""
        options = f"--nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-id {name}"
        words = [*options.split(), "--rdzv-endpoint", "10.9.0.1:29400", "--local-addr", self.address]
        words += ["--rdzv-conf", f"is_host={'true' if self.number == 0 else 'false'}"]
        train = [sys.executable, "-m", "trainwright", "train", "recipe.yaml", "--set", f"folder={name}", "--"]
        own = {"GLOO_SOCKET_IFNAME": f"v{self.number}", **environ}
        with (self._cwd / f"{name}-{self.number}.txt").open("a") as output:
            command = self.inside(*train, *words)
            return subprocess.Popen(
                command, cwd=self._cwd, env={**os.environ, **own}, stdout=output, stderr=output, start_new_session=True
            )

    def kill(self) -> None:
        """Kills every process of this node except the one that keeps its namespaces alive."""
        mine = network_of(self.pid)
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.pid:
                with suppress(OSError):
                    if network_of(entry.name) == mine:
                        os.kill(int(entry.name), signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._holder.kill()
        self._holder.wait()


def network_of(process: int | str) -> Path:
    return Path(f"/proc/{process}/ns/net").readlink()


def main() -> None:
    """Prints one line of JSON for each part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--inside", action="store_true", help="it runs in a namespace already")
    options = parser.parse_args()
    if not options.inside:
        if not can_unshare():
            print(json.dumps({"bench": "cluster", "skipped": "network namespaces are not allowed here"}))
            return
        again = ["-m", "benchmarks.cluster", "--inside", "--mbit", str(options.mbit)]
        sys.exit(subprocess.run(["unshare", "-Urnu", sys.executable, *again], check=False).returncode)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        (place / "slow.py").write_text(MODULE)
        (place / "recipe.yaml").write_text(RECIPE)
        nodes = [Node(number, place) for number in NODES]
        for node in nodes:
            stack.callback(node.close)
        subprocess.run(["ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"], check=True)
        for node in nodes:
            subprocess.run(f"ip link set v{node.number} netns {node.pid}".split(), check=True)
        for node in nodes:
            node.set_up(options.mbit)
        launched = launch(nodes, place)
        parts = [launched, kill(nodes, place, launched["weights"]), slow(nodes, place)]
        for part in parts:
            print(json.dumps({"bench": "cluster", **part}), flush=True)
    sys.exit(0 if all(part["ok"] for part in parts) else 1)


def can_unshare() -> bool:
    """Return True if a process may have a network namespace, and the tools to set it up are installed."""
    words = ["unshare", "-Urnu", "sh", "-c"]
    try:
        return not subprocess.run(
            [*words, "ip link set lo up && tc qdisc"], capture_output=True, timeout=20, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def launch(nodes: list[Node], place: Path) -> dict[str, Any]:
    begin_s = time.monotonic()
    codes = ended([node.train("launch") for node in nodes])
    seconds = round(time.monotonic() - begin_s, 1)
    weights = last_weights(place / "launch/run")
    said = (place / "launch-0.txt").read_text()
    return {"case": "launch", "ok": codes == [0, 0] and weights != "", "weights": weights, "seconds": seconds} | (
        {} if codes == [0, 0] else {"said": said[-1500:]}
    )


def kill(nodes: list[Node], place: Path, wanted: str) -> dict[str, Any]:
    running = [node.train("kill") for node in nodes]
    at = wait_for_steps(place / "kill/run/log.jsonl", 20, running)
    nodes[1].kill()
    running[1].wait()
    begin_s = time.monotonic()
    running[1] = nodes[1].train("kill")
    codes = ended(running)
    seconds = round(time.monotonic() - begin_s, 1)
    weights = last_weights(place / "kill/run")
    part = {"case": "kill", "ok": codes == [0, 0] and weights == wanted != "", "killed_at": at, "codes": codes}
    part |= {"same_bits": weights == wanted != "", "seconds_to_the_end": seconds}
    said = "".join((place / f"kill-{node.number}.txt").read_text()[-2500:] for node in nodes)
    return part if part["ok"] else {**part, "said": said}


def slow(nodes: list[Node], place: Path) -> dict[str, Any]:
    codes = ended([node.train("slow", READ_S="0.002" if node.number == 0 else "0.015") for node in nodes])
    log = [json.loads(line) for line in (place / "slow/run/log.jsonl").read_text().splitlines()]
    found = [each["symptom"] for each in log if each["kind"] == "found" and each["code"] == "ranks.straggler"]
    ok = codes == [0, 0] and any("ranks 2, 3 (machine node1)" in each for each in found)
    return {"case": "slow", "ok": ok, "found": found}


def ended(running: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Waits for the processes. Returns their exit codes; None for a process that did not end in time."""
    end_s = time.monotonic() + LIMIT_S
    for each in running:
        with suppress(subprocess.TimeoutExpired):
            each.wait(max(1.0, end_s - time.monotonic()))
    return [each.poll() for each in running]


def wait_for_steps(log: Path, count: int, running: list[subprocess.Popen[bytes]]) -> int:
    """Waits until at least ``count`` steps are logged. Returns their number."""
    end_s = time.monotonic() + LIMIT_S
    while (steps := log.read_bytes().count(b'"kind":"step"') if log.exists() else 0) < count:
        assert time.monotonic() < end_s and all(each.poll() is None for each in running), "it did not train"
        time.sleep(0.02)
    return steps


def last_weights(run: Path) -> str:
    """Returns a hash of the final weights; "" if the run has not reached its end."""
    path = run / "checkpoints/step-00000060"
    if not path.exists():
        return ""
    weights = read_weights(path)
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()[:16]


if __name__ == "__main__":
    main()
