"""Small training programs with state that a replay of their steps could change by mistake.

Each function builds one program. ``folder`` is where it may write files. Classes are defined inside of the functions,
so that each run begins with new counters.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import logging
import random
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset


@dataclass
class Program:
    """``step`` makes one update. ``state`` returns other state that must be the same. ``watch``: arguments of tw.watch.

    ``close`` is called at the end.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], object]
    state: Callable[[], object] = lambda: None
    watch: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None


Attack = Callable[[Path], Program]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    """Adds a program to ``ATTACKS``."""
    ATTACKS[function.__name__] = function
    return function


class Net(nn.Module):
    """Two layers, with ``between`` applied to the hidden units."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        for name, value in attributes.items():
            setattr(self, name, value)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.between(self.first(x))))
        return out


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randint(3, (8,))


def program(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    call: Callable[..., Tensor] | None = None,
    state: Callable[[], object] = lambda: None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    close: Callable[[], object] = lambda: None,
) -> Program:
    """The usual loop. ``call`` is used to call the model."""
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> None:
        x, y = batch()
        chosen.zero_grad()
        loss((call or model)(x), y).backward()
        chosen.step()

    return Program(model, chosen, step, state, close=close)


def noisy(hidden: Tensor, noise: Any) -> Tensor:
    return hidden + 0.1 * torch.as_tensor(noise, dtype=hidden.dtype).reshape(-1)[:1]


# generators


@attack
def torch_generator_of_a_module(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            return hidden * (torch.rand(hidden.shape, generator=self.generator) > 0.1)  # type: ignore[call-overload]

    return program(Own(generator=torch.Generator().manual_seed(1)))


GLOBAL_RNG = np.random.default_rng(0)


def draw_globally() -> float:
    return float(GLOBAL_RNG.random())


@attack
def generator_of_the_module_of_python(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            return noisy(hidden, draw_globally())

    GLOBAL_RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state
    return program(Own(), state=lambda: GLOBAL_RNG)


@attack
def generator_that_is_passed_as_an_argument(folder: Path) -> Program:
    class Own(Net):
        def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
            return super().forward(x + 0.1 * torch.randn(x.shape, generator=generator))

    rng, model = torch.Generator().manual_seed(1), Own()
    return program(model, call=lambda x: model(x, generator=rng), state=rng.get_state)


@attack
def generators_of_the_process_are_seeded_in_forward(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            torch.manual_seed(self.calls)
            np.random.seed(self.calls)
            random.seed(self.calls)
            return F.dropout(hidden, 0.1) + np.random.rand() * 0.1 + random.random() * 0.1

    return program(Own())


# iterators


@attack
def generator_function(folder: Path) -> Program:
    def schedule() -> Iterator[float]:
        for number in range(1000):
            yield 1 / (1 + 0.1 * number)

    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            return hidden * next(self.schedule)  # type: ignore[call-overload]

    return program(Own(schedule=schedule()))


# containers and objects


@attack
def nested_containers(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            self.log["a"][0]["calls"] += 1
            self.log["a"][1].append(float(hidden.detach().mean()))
            self.log["b"].setdefault(hidden.shape, collections.Counter())["seen"] += 1
            return hidden / (1 + 0.01 * self.log["a"][0]["calls"])

    return program(Own(log={"a": ({"calls": 0}, []), "b": {}}))


CALLS = 0
SEEN: dict[str, list[int]] = {}


@attack
def globals_of_the_program(folder: Path) -> Program:
    def forget() -> None:
        global CALLS
        CALLS = 0
        SEEN.clear()

    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            global CALLS
            CALLS += 1
            SEEN.setdefault("calls", []).append(CALLS)
            return hidden / CALLS

    forget()
    return program(Own(), state=lambda: (CALLS, SEEN))


@attack
def object_that_the_loop_passes(folder: Path) -> Program:
    class Context:
        calls = 0
        memory: list[Tensor] = []  # noqa: RUF012

    class Own(Net):
        def forward(self, x: Tensor, context: Any = None) -> Tensor:
            context.calls += 1
            context.memory = [*context.memory, x.detach()][-3:]
            return super().forward(x) / context.calls

    context, model = Context(), Own()
    return program(model, call=lambda x: model(x, context), state=lambda: vars(context))


@attack
def counter_in_c(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            self.number.value += 1
            return hidden / self.number.value

    number = ctypes.c_long(0)
    return program(Own(number=number), state=lambda: number.value)


@attack
def work_in_another_thread(folder: Path) -> Program:
    log: list[int] = []

    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            self.pool.submit(log.append, 1).result()
            return hidden / len(log)

    pool = ThreadPoolExecutor(1)
    return program(Own(pool=pool), state=lambda: log, close=pool.shutdown)


# files and output


@attack
def open_file(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            self.file.write(f"{float(hidden.detach().mean())}\n")
            return hidden

    file = (folder / "log.txt").open("w")
    return program(Own(file=file), state=file.flush, close=file.close)


@attack
def file_that_is_opened_in_forward_and_errors_are_caught(folder: Path) -> Program:
    class Own(Net):
        failed = 0

        def between(self, hidden: Tensor) -> Tensor:
            try:
                with (folder / "log.txt").open("a") as file:
                    file.write(f"{float(hidden.detach().mean())}\n")
            except Exception:
                self.failed += 1
            return hidden

    return program(Own())


@attack
def data_base(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            self.base.execute("insert into log values (1)")
            self.base.commit()
            return hidden

    base = sqlite3.connect(folder / "log.db")
    base.execute("create table log (n int)")
    return program(Own(base=base), state=lambda: base.execute("select count(*) from log").fetchone(), close=base.close)


@attack
def printed_lines(folder: Path) -> Program:
    class Own(Net):
        calls = 0

        def between(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            print("forward", self.calls)
            return hidden

    return program(Own())


@attack
def logged_lines(folder: Path) -> Program:
    logger = logging.getLogger(f"attack.{folder.parent.name}.{folder.name}")
    logger.propagate = False
    handler = logging.FileHandler(folder / "log.txt")
    logger.addHandler(handler)

    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            logger.warning("mean %.6f", float(hidden.detach().mean()))
            return hidden

    return program(Own(), close=handler.close)


@attack
def warnings_that_are_counted(folder: Path) -> Program:
    shown: list[str] = []

    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            warnings.warn("of the model", stacklevel=1)
            return hidden

    model = Own()
    usual = program(model)

    def step(number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *rest: shown.append(str(message))  # type: ignore[assignment]
            usual.step(number)

    return Program(model, usual.optimizer, step, lambda: shown)


# hooks and autograd Functions


@attack
def forward_hooks(folder: Path) -> Program:
    model, seen, calls = Net(), list[float](), 0

    def before(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1

    model.first.register_forward_pre_hook(before)
    model.last.register_forward_hook(lambda module, args, out: seen.append(float(out.detach().mean())))
    model.register_forward_hook(lambda module, args, out: out / (1 + 0.01 * calls))
    return program(model, state=lambda: (seen, calls))


@attack
def backward_hooks(folder: Path) -> Program:
    model, seen = Net(), {"before": [0.0], "after": [0.0]}
    model.last.register_full_backward_hook(lambda m, into, out: seen["after"].append(float(out[0].norm())))
    model.last.register_full_backward_pre_hook(lambda m, out: seen["before"].append(float(out[0].norm())))
    return program(model, state=lambda: seen)


@attack
def hook_of_an_object(folder: Path) -> Program:
    class Meter:
        def __init__(self) -> None:
            self.total, self.by_name = 0.0, dict[str, list[float]]()

        def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.total += float(out.detach().sum())
            self.by_name.setdefault(type(module).__name__, []).append(self.total)

    model, meter = Net(), Meter()
    for module in (model.first, model.last):
        module.register_forward_hook(meter.hook)
    return program(model, state=lambda: vars(meter))


@attack
def hooks_of_an_optimizer(folder: Path) -> Program:
    model, steps = Net(), {"before": 0, "after": 0}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def count(key: str) -> Callable[..., None]:
        def hook(optimizer: object, args: object, kwargs: object) -> None:
            steps[key] += 1

        return hook

    optimizer.register_step_pre_hook(count("before"))
    optimizer.register_step_post_hook(count("after"))
    return program(model, optimizer, state=lambda: steps)


@attack
def average_of_torch_in_a_hook_of_an_optimizer(folder: Path) -> Program:
    model = Net()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    return program(model, optimizer, state=ema.state_dict)


@attack
def optimizers_in_hooks_of_gradients(folder: Path) -> Program:
    """Each parameter has an optimizer of its own, which steps inside of backward."""
    model = Net()
    inner = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.last.parameters()}

    def step(p: Tensor) -> None:
        inner[p].step()  # type: ignore[index]
        inner[p].zero_grad()  # type: ignore[index]

    for p in inner:
        p.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    return program(model, optimizer, state=lambda: [each.state_dict() for each in inner.values()])


@attack
def hooks_on_all_modules(folder: Path) -> Program:
    model, calls = Net(), [0]
    usual = program(model, state=lambda: calls)

    def count(module: nn.Module, args: object, out: object) -> None:
        calls[0] += 1

    def step(number: int) -> None:
        handle = nn.modules.module.register_module_forward_hook(count)
        try:
            usual.step(number)
        finally:
            handle.remove()

    return Program(model, usual.optimizer, step, usual.state)


@attack
def counters_of_an_autograd_function(folder: Path) -> Program:
    class Scale(torch.autograd.Function):
        forwards = backwards = 0
        log: list[float] = []  # noqa: RUF012

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            Scale.forwards += 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Scale.backwards += 1
            Scale.log.append(float(grad.norm()))
            return grad * 2 / Scale.backwards

    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            out: Tensor = Scale.apply(hidden)
            return out

    return program(Own(), state=lambda: (Scale.forwards, Scale.backwards, Scale.log))


@attack
def counters_of_a_loss_that_is_a_function(folder: Path) -> Program:
    class Scale(torch.autograd.Function):
        backwards = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Scale.backwards += 1
            return grad.clone()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(Scale.apply(out), y)

    return program(Net(), loss=loss, state=lambda: Scale.backwards)


@attack
def hooks_on_saved_tensors(folder: Path) -> Program:
    packed = [0, 0]

    def pack(x: Tensor) -> Tensor:
        packed[0] += 1
        return x

    def unpack(x: Tensor) -> Tensor:
        packed[1] += 1
        return x

    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return torch.tanh(hidden)

    return program(Own(), state=lambda: packed)


@attack
def counter_under_checkpointing(folder: Path) -> Program:
    class Own(Net):
        calls = 0

        def inner(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(F.dropout(x, 0.1))

        def between(self, hidden: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, hidden, use_reentrant=False)
            return out

    return program(Own())


# parts of torch with state


@attack
def normalizations(folder: Path) -> Program:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 8)),
        nn.BatchNorm1d(8),
        parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.Dropout(0.1),
        nn.Linear(8, 3),
    )
    return program(model)


@attack
def loss_with_state(folder: Path) -> Program:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("counts", torch.ones(3))
            self.seen: dict[str, int] = {"calls": 0}

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            self.seen["calls"] += 1
            self.counts += torch.bincount(y, minlength=3)
            return self.scale * F.cross_entropy(out, y, weight=1 / self.counts) / self.seen["calls"]

    model, loss = Net(), Balanced()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    made = program(model, optimizer, loss=loss, state=lambda: (loss.state_dict(), loss.seen))
    made.watch["loss"] = loss
    return made


@attack
def optimizer_with_state_of_its_own(folder: Path) -> Program:
    class Lookahead(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.calls, self.log = 0, {"norms": [0.0]}
            self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.calls += 1
            super().step()
            self.log["norms"].append(float(self.param_groups[0]["params"][0].norm()))
            for group, slow in zip(self.param_groups, self.slow):
                for p, kept in zip(group["params"], slow):
                    kept.lerp_(p, 1 / self.calls)
                    if self.calls % 2 == 0:
                        p.copy_(kept)

    model = Net()
    optimizer = Lookahead(model.parameters(), lr=0.1)
    return program(model, optimizer, state=lambda: (optimizer.calls, optimizer.log, optimizer.slow))


@attack
def lists_in_the_state_of_an_optimizer(folder: Path) -> Program:
    class Remembering(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                group.setdefault("log", {}).setdefault("steps", []).append(1)
                for p in group["params"]:
                    self.state[p].setdefault("norms", {}).setdefault("all", []).append(float(p.norm()))

    model = Net()
    return program(model, Remembering(model.parameters(), lr=0.1))


@attack
def carried_hidden_state(folder: Path) -> Program:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 3)
            self.memory: dict[str, Any] = {"hidden": None, "steps": [0]}

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.cell(x, self.memory["hidden"])
            self.memory["hidden"] = hidden.detach()
            self.memory["steps"][0] += 1
            out: Tensor = self.head(hidden)
            return out

    return program(Own())


@attack
def settings_of_the_process(folder: Path) -> Program:
    class Own(Net):
        def between(self, hidden: Tensor) -> Tensor:
            self.flag = not getattr(self, "flag", False)
            torch.backends.mkldnn.flags  # noqa: B018
            torch.set_flush_denormal(self.flag)
            torch.use_deterministic_algorithms(self.flag)
            torch.set_default_dtype(torch.float64 if self.flag else torch.float32)
            return hidden + torch.zeros(()).to(hidden.dtype)

    model = Own()
    usual = program(model)

    def state() -> object:
        return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()

    def step(number: int) -> None:
        x, y = torch.randn(8, 4, dtype=torch.float32), torch.randint(3, (8,))
        usual.optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        usual.optimizer.step()

    return Program(model, usual.optimizer, step, state)


# evaluations and data


def generate(model: nn.Module, generator: torch.Generator | None = None) -> Tensor:
    tokens = torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(4):
            probabilities = torch.softmax(model(F.one_hot(tokens[:, -1], 4).float()), -1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


@attack
def generation_after_an_evaluation(folder: Path) -> Program:
    model, log = Net(), list[Any]()
    usual = program(model)

    def step(number: int) -> None:
        usual.step(number)
        if number % 2 == 1:
            model.eval()
            with torch.no_grad():
                x, y = batch()
                out = model(x)
                log.append((float(F.cross_entropy(out, y)), float((out.argmax(-1) == y).float().mean())))
            log.append(generate(model).tolist())
            model.train()

    return Program(model, usual.optimizer, step, lambda: log)


@attack
def sampling_inside_of_an_evaluation(folder: Path) -> Program:
    model, log, own = Net(), list[Any](), torch.Generator().manual_seed(1)
    usual = program(model)

    def step(number: int) -> None:
        usual.step(number)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                x, y = batch()
                probabilities = torch.softmax(model(x), -1)
                drawn = torch.multinomial(probabilities, 1)[:, 0]
                other = torch.multinomial(probabilities, 1, generator=own)[:, 0]
                noisy = (probabilities + 0.1 * torch.rand_like(probabilities)).argmax(-1)
                right = int((drawn == y).sum()) + int((other == y).sum()) + int((noisy == y).sum())
                log.append((right, float(torch.bernoulli(probabilities).mean())))
        model.train()

    return Program(model, usual.optimizer, step, lambda: (log, own.get_state()))


@attack
def metrics_that_are_modules(folder: Path) -> Program:
    class Accuracy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("right", torch.zeros(()))
            self.calls = 0

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            self.right += (out.argmax(-1) == y).sum()
            return self.right / (8 * self.calls)

    model, metric, log = Net(), Accuracy(), list[float]()
    usual = program(model)

    def step(number: int) -> None:
        usual.step(number)
        model.eval()
        with torch.no_grad():
            x, y = batch()
            log.append(float(metric(model(x), y)))
        model.train()

    return Program(model, usual.optimizer, step, lambda: (log, metric.calls, metric.right))


class Counted(Dataset[Any]):
    reads = 0

    def __init__(self) -> None:
        self.x, self.y, self.log = torch.randn(32, 4), torch.randint(3, (32,)), list[int]()
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        Counted.reads += 1
        self.log.append(index)
        return self.x[index] + float(self.rng.random()) * 0.1, self.y[index]


def loaded(loader: DataLoader[Any], state: Callable[[], object] = lambda: None) -> Program:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    source = forever()

    def step(number: int) -> None:
        x, y = next(source)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return Program(model, optimizer, step, state, {"loader": loader})


@attack
def dataset_with_counters(folder: Path) -> Program:
    Counted.reads = 0
    data = Counted()
    return loaded(DataLoader(data, batch_size=8, shuffle=True), lambda: (Counted.reads, data.log, data.rng))


@attack
def samplers_with_generators(folder: Path) -> Program:
    own, drawn = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    return loaded(
        DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=own), generator=drawn),
        lambda: (own.get_state(), drawn.get_state()),
    )


@attack
def stream_of_data(folder: Path) -> Program:
    class Stream(IterableDataset[Any]):
        def __init__(self) -> None:
            self.at, self.source = 0, itertools.count()

        def __iter__(self) -> Iterator[Any]:
            rng = np.random.default_rng(self.at)
            while True:
                self.at += 1
                next(self.source)
                yield torch.from_numpy(rng.standard_normal(4)).float(), int(rng.integers(3))

    data = Stream()
    return loaded(DataLoader(data, batch_size=8), lambda: (data.at, repr(data.source)))


# modes, patches and odd programs


class CountFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = collections.Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


def under(mode: Any, where: str) -> Program:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        x, y = batch()
        with mode if where == "step" else contextlib.nullcontext():
            optimizer.zero_grad()
            with mode if where == "forward" else contextlib.nullcontext():
                out = model(x)
            F.cross_entropy(out, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    def state() -> object:
        stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        assert not stack, f"a mode was left on the stack: {stack}"
        return mode.calls

    return Program(model, optimizer, step, state)


for _mode in (CountFunctions, CountOperators):
    for _where in ("step", "forward"):
        ATTACKS[f"{_mode.__name__}_around_the_{_where}"] = lambda folder, m=_mode, w=_where: under(m(), w)  # type: ignore[misc]


@attack
def lazy_modules(folder: Path) -> Program:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    return program(model, torch.optim.SGD(model.parameters(), lr=0.1))


@attack
def deep_recursion(folder: Path) -> Program:
    class Deep(Net):
        def forward(self, x: Tensor, depth: int = 205) -> Tensor:
            return super().forward(x) if depth == 0 else self(x, depth - 1)

    return program(Deep())


@attack
def complex_weights(folder: Path) -> Program:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat) * 0.1)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x) @ self.weight
            out: Tensor = self.head(torch.fft.irfft(spectrum, n=4))
            return out

    return program(Spectral())
