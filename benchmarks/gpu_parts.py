"""Runs one part of ``scripts/gpu`` in this process: ``python -m benchmarks.gpu_parts PART DEVICE``.

Prints JSON lines. With ``cuda`` but no CUDA device, it prints that the part was skipped, and exits with 0. With
``cpu``, it runs in a small form, which only shows that the code works.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.figures import about, figure, ratios

if TYPE_CHECKING:
    from trainwright.engine.graphs import StepGraphs

ROOT = Path(__file__).parent.parent
GPT2 = {"layers": 12, "d_model": 768, "block_size": 1024, "vocab_size": 50257}
SMALL = {"layers": 2, "d_model": 64, "block_size": 32, "vocab_size": 128}


def flops_per_token(parameters: int, *, layers: int, d_model: int, block_size: int) -> float:
    """Returns the FLOPs of forward and backward pass of a GPT per token: 6 N + 12 L T D.

    ``parameters`` (N): those of matrix products, without position embeddings; a tied token embedding counts once, as
    the head. The second term is attention without the saving by the causal mask (PaLM, appendix B, arXiv:2204.02311).
    """
    return 6.0 * parameters + 12.0 * layers * block_size * d_model


def utilization(tokens_per_s: float, flops_of_a_token: float, peak_flops: float) -> float:
    """Returns the model FLOPs utilization: the FLOP/s that the model needs, as a fraction of the device's peak rate."""
    return tokens_per_s * flops_of_a_token / peak_flops


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the peak FLOP/s of this GPU in the table of devices; None if it is not in the table."""
    if device.type != "cuda":
        return None
    try:
        from trainwright.plan.trace.local_device import local_device
    except ImportError:  # a package that only the planner needs is missing
        return None
    found = local_device(probe=False)
    return None if found.source.startswith("not in the table") else found.flops.get(precision)


class Gpt:
    """GPT-2 124M with its step function and with batches on the device; on a CPU, a tiny GPT."""

    def __init__(
        self,
        device: torch.device,
        precision: str,
        *,
        compiled: bool = False,
        accumulation: int = 1,
        captured: bool = False,
    ) -> None:
        from trainwright.assembly.linear_layers import convert_linear_layers
        from trainwright.checkpoint.train_state import TrainState
        from trainwright.engine.losses import language_model
        from trainwright.engine.precision import MatmulMode, Precision
        from trainwright.engine.step import make_step
        from trainwright.models.gpt import gpt
        from trainwright.optim.clip import make_clip
        from trainwright.recipe.schema import Fp8

        torch.manual_seed(0)
        self.device, self.shape = device, GPT2 if device.type == "cuda" else SMALL
        self.micro, self.accumulation = (16 if device.type == "cuda" else 2), accumulation
        self.model = gpt(heads=12 if device.type == "cuda" else 2, **self.shape).to(device)
        how = Precision(precision, device.type)  # type: ignore[arg-type]
        MatmulMode.for_precision(precision).set()  # type: ignore[arg-type]
        if precision in ("fp8", "mxfp8"):
            convert_linear_layers(self.model, precision, Fp8())  # type: ignore[arg-type]
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.state = TrainState(self.model, self.optimizer, scaler=how.scaler(device))
        graphs = captured_steps(device) if captured else None
        self.advance = make_step(language_model, precision=how, clip=make_clip("norm", 1.0), graphs=graphs)

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.micro * self.accumulation * self.shape["block_size"]

    def batches(self) -> Iterator[object]:
        import numpy as np

        from trainwright.checkpoint.cursor import MicroBatch, StepBatch

        ids = torch.randint(self.shape["vocab_size"], (self.micro, self.shape["block_size"]), device=self.device)
        numbers = np.arange(self.micro, dtype=np.int64)
        while True:
            yield StepBatch(tuple(MicroBatch((ids, ids), numbers) for _ in range(self.accumulation)))

    def train(self, steps: int) -> None:
        """Runs steps without waiting for the device."""
        from trainwright.engine.loop import for_steps
        from trainwright.engine.loop import steps as engine_steps

        until = for_steps(self.state.step + steps)
        for _ in engine_steps(self.state, self.batches(), self.advance, until=until):  # type: ignore[arg-type]
            pass

    def speed(self, steps: int) -> float:
        """Runs steps, and waits until the device has finished them. Returns tokens/s."""
        wait_for(self.device)
        begin_s = time.perf_counter()
        self.train(steps)
        wait_for(self.device)
        return steps * self.tokens / (time.perf_counter() - begin_s)


def captured_steps(device: torch.device) -> StepGraphs | None:
    """Returns the object that captures CUDA graphs of steps; None on a CPU. It prints the reason if capturing fails."""
    from trainwright.engine.graphs import CudaGraphs, StepGraphs

    def report(reason: str) -> None:
        print(json.dumps({"bench": "gpu_graphs", "case": "not captured", "error": reason}), flush=True)

    return StepGraphs(CudaGraphs(device), report=report) if device.type == "cuda" else None


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count(device: torch.device, on_gpu: int) -> int:
    """Returns a number of steps or rounds: ``on_gpu``, or 2 on a CPU."""
    return on_gpu if device.type == "cuda" else 2


def tests(device: torch.device) -> None:
    """Runs the tests that need a GPU; on a CPU, those that can run there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    for word in ("passed", "failed", "skipped"):
        figure("gpu_tests", word, [counts.get(word, 0)], unit="tests", against="absolute")
    if done.returncode:
        raise SystemExit(f"{done.stdout[-1500:]}\n{done.stderr[-400:]}")


def sync(device: torch.device) -> None:
    """Check that a step of the engine never waits for the device, and count how often a step of ``tw.fit`` does."""
    for precision in ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16"):
        for accumulation in (1, 4):
            gpt = Gpt(device, precision, accumulation=accumulation)
            gpt.train(3)
            case = f"{precision}_accum{accumulation}"
            where = first_sync(partial(gpt.train, count(device, 5)), device)
            line = {"bench": "gpu_sync", "case": case, "value": int(bool(where)), "unit": "syncs", "where": where}
            print(json.dumps(line), flush=True)
    figure("gpu_sync", "fit", [syncs_of_fit(device)], unit="syncs/step", against="absolute")


def first_sync(act: Callable[[], object], device: torch.device) -> str:
    """Returns the innermost line of the package that synchronized with the device; "" if none did."""
    if device.type != "cuda":
        act()
        return ""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        act()
    except RuntimeError as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "trainwright" in frame.filename]
        last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
        return f"{last.filename}:{last.lineno} {last.line}: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def syncs_of_fit(device: torch.device, steps: int = 100) -> float:
    """Returns the mean number of synchronizations of a default ``tw.fit`` step, after the first 64 steps."""
    import trainwright as tw

    class SyncDebug:
        """Switches torch's warnings on after step 64."""

        def observe(self, result: object, state: tw.TrainState) -> None:
            if state.step == 64 and device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")

        def close(self) -> None:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    x = torch.randn(4096, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tw.fit(
            model,
            (x, x[:, :10].argmax(1)),
            torch.nn.CrossEntropyLoss(),
            until=f"{64 + steps}steps",
            batch=64,
            settings={"folder": folder},
            observers=[SyncDebug()],
            quiet=True,
        )
    return sum("synchroniz" in str(each.message) for each in caught) / steps


def other_benchmark(name: str, *options: str) -> None:
    """Runs another benchmark, which prints its own figures."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *options], check=False)
    if done.returncode:
        raise SystemExit(f"{name} {' '.join(options)} ended with {done.returncode}")


def overhead(device: torch.device) -> None:
    small = () if device.type == "cuda" else ("--quick", "--tasks", "mlp", "--threads", "1")
    variants = "plain_same_optimizer,fit,train,fabric"
    other_benchmark("step_overhead", "--device", device.type, "--only", variants, "--rounds", "2", *small)


def watch(device: torch.device) -> None:
    small = (
        ("--rounds", "3", "--mlp_steps", "400", "--gpt_steps", "128")
        if device.type == "cuda"
        else ("--quick", "--threads", "1")
    )
    other_benchmark("watch_overhead", "--device", device.type, *small)


def zoo(device: torch.device) -> None:
    small = ("--seconds", "200") if device.type == "cuda" else ("--jobs", "2", "--seconds", "60")
    other_benchmark("gpu_zoo", "--device", device.type, *small)


def stall(device: torch.device) -> None:
    small = () if device.type == "cuda" else ("--quick", "--threads", "1")
    engines = "torch_save,dcp_async,ours_at_once,ours"
    other_benchmark("checkpoint_stall", "--device", device.type, "--only", engines, "--rounds", "2", *small)


def plan(device: torch.device) -> None:
    if device.type == "cpu":
        other_benchmark("plan_accuracy", "--quick", "--device", "cpu")
        return
    begin_s = time.perf_counter()
    for model in ("gpt", "resnet", "bert", "lora", "lstm"):
        if time.perf_counter() - begin_s > 150:
            break
        other_benchmark("plan_accuracy", "--device", "cuda", "--only", model)


def eight_bits(device: torch.device) -> list[str]:
    """Returns the 8-bit precisions that the device supports in hardware."""
    from trainwright.distributed import low_precision
    from trainwright.plan.machine import read_machine

    return [name for name in low_precision(device, read_machine()) if "fp8" in name]


def amp(device: torch.device) -> None:
    """Measures tokens/s by precision, eager and compiled."""
    names = ["fp32", "tf32", "bf16", "fp16"] if device.type == "cuda" else ["fp32", "bf16"]
    names += [name for name in eight_bits(device) if find_spec("torchao")]
    speeds: dict[str, list[float]] = {}
    for compiled in (False, True) if device.type == "cuda" else (False,):
        for precision in names:
            gpt = Gpt(device, precision, compiled=compiled)
            gpt.train(count(device, 5))
            case = f"{precision}_compiled" if compiled else precision
            speeds[case] = [gpt.speed(count(device, 20)) for _ in range(3)]
            figure("gpu_amp", case, speeds[case], unit="tokens/s", against="absolute")
            faster = [one / other for one, other in zip(speeds[case], speeds["fp32"])]
            figure("gpu_amp", f"{case}_speedup", faster, unit="ratio", against="fp32, eager")
            del gpt
            if device.type == "cuda":
                torch.cuda.empty_cache()


def mfu(device: torch.device) -> None:
    """Measures the utilization of engine steps with batches on the device."""
    ways = {"engine": {}, "compiled": {"compiled": True}, "compiled_graphs": {"compiled": True, "captured": True}}
    for case, how in (ways if device.type == "cuda" else {"engine": {}}).items():
        gpt = Gpt(device, "bf16", accumulation=count(device, 4), **how)
        gpt.train(count(device, 8))
        speeds = [gpt.speed(count(device, 12)) for _ in range(3)]
        show_utilization(case, speeds, flops_of(gpt), peak_flops(device, "bf16"))
        forget(gpt)


def flops_of(gpt: Gpt) -> float:
    shape = {name: gpt.shape[name] for name in ("layers", "d_model", "block_size")}
    positions = shape["block_size"] * shape["d_model"]
    return flops_per_token(sum(p.numel() for p in gpt.model.parameters()) - positions, **shape)


def forget(gpt: Gpt) -> None:
    gpt.state = gpt.model = gpt.optimizer = gpt.advance = None  # type: ignore[assignment]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(device: torch.device) -> None:
    """Measures ``trainwright train`` with the recipe of GPT-2 124M."""
    if device.type == "cuda":
        gpt = Gpt(device, "bf16")
        flops = flops_of(gpt)
        forget(gpt)
        show_utilization("train", [speed_of_recipe()], flops, peak_flops(device, "bf16"))


def graphs(device: torch.device) -> None:
    """Measures a step that is limited by the host: engine, and engine with CUDA graphs, relative to a plain loop."""
    layers, width, rows = (24, 256, 64) if device.type == "cuda" else (2, 16, 4)
    steps = count(device, 200)
    x, y = torch.randn(rows, width, device=device), torch.randint(width, (rows,), device=device)
    seconds: dict[str, list[float]] = {"plain": [], "engine": [], "graphs": []}
    runs = {"plain": plain_steps(deep_mlp(layers, width, device), x, y)}
    runs["engine"] = engine_steps(deep_mlp(layers, width, device), x, y, None)
    runs["graphs"] = engine_steps(deep_mlp(layers, width, device), x, y, captured_steps(device))
    for act in runs.values():
        act(8)
    for _ in range(5):
        for name, act in runs.items():
            wait_for(device)
            begin_s = time.perf_counter()
            act(steps)
            wait_for(device)
            seconds[name].append((time.perf_counter() - begin_s) / steps)
    figure("gpu_graphs", "plain_step", [1e3 * each for each in seconds["plain"]], unit="ms", against="absolute")
    for name in ("engine", "graphs"):
        figure("gpu_graphs", name, ratios(seconds[name], seconds["plain"]), unit="ratio", against="plain loop")


def deep_mlp(layers: int, width: int, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(layers)]
    return torch.nn.Sequential(*blocks).to(device)


def plain_steps(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[int], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def act(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return act


def engine_steps(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, graphs: StepGraphs | None
) -> Callable[[int], None]:
    import numpy as np

    import trainwright as tw

    state = tw.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    advance = tw.make_step(torch.nn.CrossEntropyLoss(), clip=tw.make_clip("norm", 1.0), graphs=graphs)
    batch = tw.StepBatch((tw.MicroBatch((x, y), np.arange(len(x))),))

    def act(steps: int) -> None:
        for _ in tw.steps(state, repeat(batch), advance, until=tw.for_steps(state.step + steps)):
            pass

    return act


def host(device: torch.device) -> None:
    """Measures the CPU time of a step on this machine."""
    small = ("--sizes", "8,100,600", "--turns", "8", "--seconds", "45") if device.type == "cuda" else ("--quick",)
    other_benchmark("host_time", *small)


def show_utilization(case: str, speeds: list[float], flops_of_a_token: float, peak: float | None) -> None:
    figure("gpu_mfu", f"{case}_speed", speeds, unit="tokens/s", against="absolute")
    rates = [speed * flops_of_a_token for speed in speeds]
    figure("gpu_mfu", f"{case}_rate", rates, unit="FLOP/s", against="absolute")
    shares = [utilization(speed, flops_of_a_token, peak) for speed in speeds] if peak else []
    figure("gpu_mfu", case, shares, unit="share", against=f"{peak:.3g} FLOP/s" if peak else "peak not known")


def speed_of_recipe(steps: int = 80) -> float:
    """Returns the tokens/s of recipes/gpt2-124m.yaml after the first 64 steps, from its log."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"until={steps}steps", "batch.size=64", "batch.micro=16", "model.compile=true", "log.every=1steps"]
        settings += ["model.activation_checkpointing=none", "schedule.warmup=10steps", "evaluation.batches=2"]
        chosen = [word for setting in settings for word in ("--set", setting)]
        recipe = str(ROOT / "recipes" / "gpt2-124m.yaml")
        command = [sys.executable, "-m", "trainwright", "train", recipe, *chosen]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        log = next(Path(folder).glob("runs/*/log.jsonl")).read_text().splitlines()
    records = [record for line in log if (record := json.loads(line))["kind"] == "step" and record["step"] >= 64]
    first, last = records[0], records[-1]
    return float((last["tokens"] - first["tokens"]) / (last["time_s"] - first["time_s"]))


LAYOUTS = ("replicate", "shard", "tensor", "pipeline")
RANKS_RECIPE = {
    "until": "4steps",
    "model": {
        "use": "gpt",
        "args": {
            "vocab_size": 64,
            "block_size": 64,
            "layers": 2,
            "heads": 2,
            "d_model": 64,
            "tied": False,
            "bias": False,
        },
    },
    "data": {"train": "ids_of_ranks:train_set"},
    "loss": "language_model",
    "batch": {"size": 16, "micro": 4},
    "precision": "fp32",
    # with the default eps, the first update has the sign of the gradient, even if the gradient is only rounding
    "optimizer": {"use": "adamw", "lr": 1e-2, "args": {"eps": 1e-3}},
}
RANKS_DATA = """
import torch

def train_set():
    ids = torch.randint(64, (80, 65), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
"""


def ranks(device: torch.device) -> None:
    """Tests that the steps of two processes equal those of one, in each layout: NCCL on two GPUs, gloo on a CPU."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        print(json.dumps({"bench": "gpu_ranks", "skipped": "fewer than two CUDA devices"}), flush=True)
        return
    failed = []
    for layout in LAYOUTS:
        output, passed = verified(layout, device)
        text = "equals one process" if passed else "FAILED"
        line = {"bench": "gpu_ranks", "case": layout, "value": text, "unit": "", "against": "1 rank"}
        print(json.dumps(line), flush=True)
        failed += [] if passed else [f"{layout}:\n{output[-1500:]}"]
    if failed:
        raise SystemExit("\n".join(failed))


def verified(layout: str, device: torch.device) -> tuple[str, bool]:
    """Returns the output of ``verify parallel`` for two ranks in a layout, and True if they equal one process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ids_of_ranks.py").write_text(RANKS_DATA)
        (Path(folder) / "recipe.yaml").write_text(json.dumps(RANKS_RECIPE))
        command = [sys.executable, "-m", "trainwright", "verify", "parallel", "recipe.yaml", "--steps", "3"]
        command += ["--set", f"parallel.{layout}=2", "--set", f"device={device.type}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr, done.returncode == 0


PARTS: dict[str, Callable[[torch.device], None]] = {
    "graphs": graphs,
    "host": host,
    "train": train,
    "tests": tests,
    "ranks": ranks,
    "sync": sync,
    "overhead": overhead,
    "watch": watch,
    "zoo": zoo,
    "stall": stall,
    "plan": plan,
    "amp": amp,
    "mfu": mfu,
}


def main() -> None:
    part, device = sys.argv[1], torch.device(sys.argv[2])
    about(f"gpu_{part}")
    if device.type == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"bench": f"gpu_{part}", "skipped": "no CUDA device"}), flush=True)
        return
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        print(json.dumps({"bench": f"gpu_{part}", "device": name, "memory_bytes": memory}), flush=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    PARTS[part](device)


if __name__ == "__main__":
    main()
