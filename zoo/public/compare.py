"""Runs a public program with and without ``tw.watch`` and lists the differences.

Compared are all tensors and numbers in models, optimizers and losses, the states of the random generators, the files,
the printed lines and the warnings.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import math
import pickle
import random
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.public import NullWatch, Result

TIMES = re.compile(
    r"(?i)\b(?:time|data|eta|took|sps|mfu|img/s|ms/batch|iter_dt|time/fps|time/time_elapsed|\w+_runtime|\w+_per_second)"
    r"['\"]?\s*[:=|]?\s*['\"]?-?\d[\d.:,]*(?:\s*\(\s*[\d.]+\))?"  # a number after the name of a time
    r"|\d\d: \d\d: \d\d|\d+m \d+s"
    r"| *\b\d+(?:\.\d+)?(?:\s?(?:ms|s|sec|seconds)\b|/s\b)"  # a number before a unit of time
)
"""Patterns of printed times, which differ between any two runs."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@dataclass
class Run:
    """One run of a program.

    Attributes:
        parts: Digests by name, of everything compared but the printed lines.
        printed: The lines on stdout, with times replaced by ``<time>``.
        result: The metric with its value and bar, as text.
        steps: The number of losses that the program kept.
        wall_s, cpu_s: Time of the program in seconds, without imports.
        findings: Findings of ``tw.watch`` as dicts; empty without it.
        notes: Everything written to stderr.
    """

    parts: dict[str, str]
    printed: list[str]
    result: str
    learned: bool
    steps: int
    wall_s: float
    cpu_s: float
    findings: list[dict[str, Any]]
    notes: str


class TrainwrightWatch:
    """``tw.watch`` and its adapters, with the run folder ``out``; keeps every watch to read its findings."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.watches: list[Any] = []

    def __call__(self, model: Any, optimizer: Any, **options: Any) -> Any:
        import trainwright as tw

        self.watches.append(tw.watch(model, optimizer, out=self.out, **options))
        return self.watches[-1]

    def lightning(self) -> list[Any]:
        from trainwright.adapters.lightning import WatchCallback

        self.watches.append(WatchCallback(out=self.out))
        return [self.watches[-1]]

    def transformers(self) -> list[Any]:
        from trainwright.adapters.transformers import WatchTrainerCallback

        self.watches.append(WatchTrainerCallback(out=self.out))
        return [self.watches[-1]]

    def findings(self) -> list[dict[str, Any]]:
        return [asdict(each) for watch in self.watches for each in watch.findings()]


def run(name: str, seed: int, place: Path, watched: bool) -> Run:
    """Run the program ``name`` in this process.

    Args:
        name: Module of ``zoo.public``.
        seed: Seed of the program.
        place: An empty folder. Runs to be compared need the same path, because programs write it to files.
        watched: Whether to run under ``tw.watch``.
    """
    program = importlib.import_module(f"zoo.public.{name}").main
    watch = TrainwrightWatch(place / "watch") if watched else NullWatch()
    if watched:
        import trainwright  # noqa: F401  # here, so that the import is not timed
    _first_step()
    folder = place / "files"
    folder.mkdir(parents=True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        heard = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("default")
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        result: Result = program(watch, seed, folder)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        random_states = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "random": random.getstate(),
        }
        printed = [TIMES.sub("<time>", line) for line in out.getvalue().splitlines()]
        parts = dict(_leaves(result.losses, "losses"))
        parts |= dict(_leaves({k: getattr(v, "_orig_mod", v) for k, v in result.objects.items()}, "objects"))
        parts |= dict(_leaves(random_states, "random state"))
        parts |= {f"copy/{k}": _copied(v) for k, v in result.objects.items() if isinstance(v, nn.Module)}
        parts |= _files(folder)
    parts |= {f"warning/{each.category.__name__}: {TIMES.sub('<time>', str(each.message))[:200]}": "" for each in heard}
    findings = watch.findings() if isinstance(watch, TrainwrightWatch) else []
    shown = f"{result.metric} {result.value:.4g}, bar {result.bar:g}"
    return Run(
        parts, printed, shown, result.learned, len(result.losses), wall_s, cpu_s, findings, _last_lines(err.getvalue())
    )


def differences(plain: Run, watched: Run) -> list[str]:
    """Return the differences between two runs of a program with the same seed, one line per kind of object."""
    found: dict[str, list[str]] = {}
    for key in sorted(plain.parts.keys() | watched.parts.keys()):
        if plain.parts.get(key) != watched.parts.get(key):
            found.setdefault("/".join(key.split("/")[:2]), []).append(key)
    lines = [f"{kind}: {len(keys)} differ, first {keys[0]}" for kind, keys in found.items()]
    if plain.printed != watched.printed:
        pairs = zip(plain.printed, watched.printed)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        first = first or (f"{len(plain.printed)} lines", f"{len(watched.printed)} lines")
        lines.append(f"printed: {first[0]!r} is {first[1]!r} under the watch")
    return lines


def alarms(watched: Run) -> list[dict[str, Any]]:
    """Findings that are warnings or critical."""
    return [each for each in watched.findings if each["severity"] in ("warning", "critical")]


def _first_step() -> None:
    """Run one optimizer step before the program: PyTorch's lazy imports take seconds, and some warnings come once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        float(nn.Parameter(torch.ones(())))
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def _last_lines(text: str) -> str:
    """Removes from each line what a terminal overwrites: all before its last carriage return."""
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.splitlines() if line.strip())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _leaves(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yields (path, digest) of all tensors, arrays and numbers in a nested value."""
    if isinstance(value, Tensor):
        value = value.detach()
        plain = value.to_dense() if value.is_sparse else value
        data = plain.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        yield name, f"{value.dtype} {tuple(value.shape)} {_digest(data)}"
    elif isinstance(value, np.ndarray):
        yield name, f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
    elif isinstance(value, nn.Module):
        for module_name, module in value.named_modules():
            counts = [len(getattr(module, each)) for each in HOOKS]
            yield f"{name}/{module_name}#", f"{type(module).__qualname__} {module.training} hooks {counts}"
        yield from _leaves(dict(value.state_dict()), name, depth + 1)
    elif isinstance(value, Mapping):
        yield f"{name}/", f"{type(value).__name__} {len(value)}"
        for key, each in value.items():
            yield from _leaves(each, f"{name}/{key}", depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        yield f"{name}/", f"{type(value).__name__} {len(value)}"
        for index, each in enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value):
            yield from _leaves(each, f"{name}/{index}", depth + 1)
    elif isinstance(value, float):
        yield name, "nan" if math.isnan(value) else value.hex()
    elif value is None or isinstance(value, int | str | bytes | bool | np.generic | torch.dtype | torch.device):
        yield name, TIMES.sub("<time>", repr(value))
    elif callable(getattr(value, "state_dict", None)):
        yield from _leaves(value.state_dict(), name, depth + 1)
    elif depth < 8 and (is_dataclass(value) or hasattr(value, "__dict__")):
        yield from _leaves({k: v for k, v in vars(value).items() if not callable(v)}, name, depth + 1)
    else:
        yield name, type(value).__qualname__


class _NoTrainwright(pickle.Unpickler):
    """Refuses a pickle that could not be loaded without Trainwright."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "trainwright":
            raise pickle.UnpicklingError(f"the pickle needs {module}.{name}")
        return super().find_class(module, name)


_PICKLE = ModuleType("pickle_without_trainwright")
_PICKLE.Unpickler = _NoTrainwright  # type: ignore[attr-defined]
_PICKLE.load = lambda file, **more: _NoTrainwright(file, **more).load()  # type: ignore[attr-defined]


def _copied(model: nn.Module) -> str:
    """One digest of a pickled and of a deep-copied model's contents, or of the error's name if that failed."""
    found = []
    for name, make in (("pickle", pickle.dumps), ("deepcopy", copy.deepcopy)):
        try:
            made = make(model)
        except Exception as error:  # local classes cannot be pickled, tensors with a graph cannot be copied
            found.append(type(error).__name__)
        else:
            loaded = _NoTrainwright(io.BytesIO(made)).load() if name == "pickle" else made
            found.append(repr([*_leaves(loaded, name)]))
    return _digest(repr(found).encode())


def _files(folder: Path) -> dict[str, str]:
    """Digests of all files: of the values in checkpoints and TensorBoard logs, else of the text without times."""
    found: dict[str, str] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = f"file/{path.relative_to(folder).as_posix()}"
        data = path.read_bytes()
        if path.name.startswith("events.out.tfevents"):
            found[name.rsplit("events.", 1)[0] + "events"] = _scalars(path)
        elif b"data.pkl" in data[:200] or path.suffix in (".pt", ".pth", ".bin", ".pkl"):
            found |= {f"{name}/{key}": digest for key, digest in _saved(path)}
        else:
            try:
                found[name] = _digest(TIMES.sub("<time>", data.decode()).encode())
            except UnicodeDecodeError:
                found[name] = _digest(data)
    return found


def _saved(path: Path) -> Iterator[tuple[str, str]]:
    try:
        value, weights_only = torch.load(path, weights_only=True, map_location="cpu"), True
    except Exception:  # torch.load raises several types
        try:
            value, weights_only = torch.load(path, weights_only=False, pickle_module=_PICKLE, map_location="cpu"), False
        except Exception as error:
            yield "", f"cannot be loaded: {type(error).__name__}: {error}"
            return
        yield "globals", repr(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    yield "", f"weights_only={weights_only}"
    yield from _leaves(value, "")


def _scalars(path: Path) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "SPS" not in tag]
    return _digest(repr([(tag, [(e.step, e.value) for e in events.Scalars(tag)]) for tag in sorted(tags)]).encode())
