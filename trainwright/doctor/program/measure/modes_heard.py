"""Which modules were in train and which in eval mode, in training and between two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from trainwright.recorder.callers import caller
from trainwright.recorder.comparisons import Site
from trainwright.recorder.probes import Probe, WatchedObjects, probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runlog.json_values import Event, Facts
from trainwright.state.names import named_modules

EARLY = 4
"""Steps before which it is not known whether a pass without gradients belongs to every step."""


@probe
class Modes(Probe):
    """``urgent``: a module has left train mode, or the model was evaluated in train mode."""

    name = "modes"
    closes_late = True
    rests = frozenset({"on_forward"})

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots, self._modules, self._sites = watched.subject.roots, watched.subject.modules, watched.sites
        self._names = _names(self._roots)
        self._depends = [n for n, module in enumerate(self._modules) if depends_on_mode(module)]
        self._same: tuple[bool, ...] | None = (
            None  # the modes of the last step, the same object while they are the same
        )
        self._was_training: set[int] = set()
        self._eval: dict[int, int] = {}  # modules that are in eval mode in training, and since when
        self._steps = 0
        self._num_closed = 0  # of our own engine only the steps that are run again
        self._feeding: int | None = None  # the iterator whose batches are trained on
        self._fetched: int | None = None  # the one that gave a batch since the last step, and when
        self._fetched_s = 0.0
        self._lines: dict[int, str | None] = {}  # where each module was last put into eval mode
        self._passes: set[tuple[Site, bool]] = set()  # without gradients since the last step, and whether in train mode
        self._evaluated: dict[bool, list[int]] = {True: [], False: []}
        self._num_in_train = 0

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        self._fetched, self._fetched_s = id(iterator), time.time()

    def on_woken(self, events: Sequence[Event]) -> None:
        if any(kind == "forward" and how[2] for kind, how in events):
            self._feeding = self._fetched

    def on_mode(self, module: nn.Module, training: bool) -> None:
        if not training:
            line = caller()
            self._lines.update({id(each): line for each in module.modules()})

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if torch.is_grad_enabled():
            self._feeding = self._fetched
        elif self._depends and (self._fetched is None or self._fetched != self._feeding):
            in_train = root.training and all(self._modules[n].training for n in self._depends)
            self._passes.add((self._sites.current, in_train))

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        self._num_closed += 1
        if self._fetched_s <= step.ended_s:  # later ones belong to the next step
            self._fetched = None
        if self._passes:
            self._note_evaluation()
        calls = step.calls
        if not calls or (len(calls) == 1 and calls[0].training is self._same):
            return
        self._same = calls[0].training
        training = {n for call in calls for n, on in enumerate(call.training) if on}
        gone = {n for n in range(len(self._modules)) if n not in training}
        self._eval = {n: self._eval.get(n, step.step) for n in gone}
        if any(n in self._was_training and self._eval[n] == step.step for n in gone.intersection(self._depends)):
            self.urgent = True
        self._was_training |= training

    def _note_evaluation(self) -> None:
        """Notes the evaluations since the last step, on other batches than those that are trained on."""
        modes = {in_train for site, in_train in self._passes if site in self._sites}
        self._passes = set()
        for in_train in modes:
            steps = self._evaluated[in_train]
            steps.append(self._steps)
            del steps[16:]
            self.urgent |= in_train and len(steps) == 1 and self._steps > EARLY
        self._num_in_train += True in modes

    def values(self) -> Facts:
        self.urgent = False
        return {
            "steps": self._num_closed,
            "depends": len(self._depends),
            "norms": sum(isinstance(self._modules[n], _NormBase) for n in self._depends),
            "roots_in_eval": [root in self._eval_modules() for root in self._roots],
            "eval": [self._facts_of(n) for n in sorted(self._eval)][:256],
            "evaluated_in_train": list(self._evaluated[True]),
            "evaluated_in_eval": list(self._evaluated[False]),
            "num_evaluated_in_train": self._num_in_train,
        }

    def _eval_modules(self) -> list[nn.Module]:
        return [self._modules[n] for n in self._eval]

    def _facts_of(self, n: int) -> Facts:
        module = self._modules[n]
        trained = any(p.requires_grad for p in self._owner(n).parameters())
        return {
            "module": self._names[n],
            "since": self._eval[n],
            "left": n in self._was_training,
            "depends": n in self._depends,
            "norm": isinstance(module, _NormBase),
            "fresh": isinstance(module, _NormBase) and _has_measured_nothing(module),
            "container": any(True for _ in module.children()),
            "trained": trained,
            "source": self._lines.get(id(module)),
        }

    def _owner(self, n: int) -> nn.Module:
        """The module, or the smallest one around it that has weights."""
        module, name = self._modules[n], self._names[n]
        by_name = dict(zip(self._names, self._modules))
        while not any(True for _ in module.parameters()) and name:
            name = name.rpartition(".")[0]
            module = by_name.get(name, module)
        return module


def _has_measured_nothing(norm: _NormBase) -> bool:
    """Whether its running statistics are those that it was made with."""
    mean, var = norm.running_mean, norm.running_var
    return mean is not None and var is not None and not bool(mean.any()) and bool((var == 1).all())


def depends_on_mode(module: nn.Module) -> bool:
    """Whether its forward pass differs in eval mode; for a class that is not torch's, judged by its code."""
    if isinstance(module, _NormBase):
        return module.track_running_stats
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if type(module).__module__.startswith("torch.nn."):
        rate = getattr(module, "dropout", 0.0)  # a module in nn.TransformerEncoderLayer, which is judged by itself
        return isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0)
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    functions = [f for each in classes for name, f in vars(each).items() if name not in ("train", "eval")]
    return any("training" in f.__code__.co_names for f in functions if hasattr(f, "__code__"))


def _names(roots: list[nn.Module]) -> list[str]:
    """In the order of ``LiveObjects.modules``."""
    named: dict[int, str] = {}
    for name, module in named_modules(roots):
        named.setdefault(id(module), name)
    return list(named.values())
