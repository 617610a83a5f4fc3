"""Observes the mode of each module in training and in evaluations, and functions that ignore the mode."""

from __future__ import annotations

import time
import weakref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from trainwright.checkpoint.names import named_modules
from trainwright.doctor.facts.modes import Drop, DropsFacts, EvalModule, ModesFacts
from trainwright.doctor.measure.evaluations import source_of
from trainwright.doctor.measure.layers import DROPOUTS
from trainwright.recorder.callers import caller
from trainwright.recorder.comparisons import Site
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import replay
from trainwright.replay.functions import argument, function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

MIN_STEPS = 4  # Until this step, a pass without gradients may be a part of every step
MAX_EVALUATIONS = 16  # Maximum number of steps with an evaluation that are kept


class Modes(Probe):
    """Observes modes. ``urgent``: a module has left train mode, or the model was evaluated in train mode."""

    name = ModesFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots, self._modules, self._sites = watched.subject.roots, watched.subject.modules, watched.sites
        named: dict[int, str] = {}
        for name, module in named_modules(self._roots):
            named.setdefault(id(module), name)
        self._names = list(named.values())
        self._depends = [n for n, module in enumerate(self._modules) if depends_on_mode(module)]
        norms = sum(isinstance(self._modules[n], _NormBase) for n in self._depends)
        self._found = ModesFacts(depends=len(self._depends), norms=norms)
        self._same: tuple[bool, ...] | None = None  # the modes of the last step; the same object while they are equal
        self._was_training: set[int] = set()
        self._eval: dict[int, int] = {}  # modules in eval mode during training, and the step since which they are
        self._steps = 0
        # the iterator whose batches are trained on; not its id, because the next iterator may have the same id
        self._training_iterator: weakref.ref[object] | None = None
        # the iterator that yielded a batch since the last step, and when it did
        self._fetched: weakref.ref[object] | None = None
        self._fetched_s = 0.0
        self._lines: dict[int, str | None] = {}
        self._passes: set[tuple[Site, bool]] = set()  # passes without gradients since the last step, and their mode

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        self._fetched, self._fetched_s = weakref.ref(iterator), time.time()

    def on_mode(self, module: nn.Module, training: bool) -> None:
        if not training:
            line = caller()
            self._lines.update({id(each): line for each in module.modules()})

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if torch.is_grad_enabled():
            self._training_iterator = self._fetched
        elif self._depends and (self._fetched is None or self._fetched != self._training_iterator):
            in_train = root.training and all(self._modules[n].training for n in self._depends)
            self._passes.add((self._sites.current, in_train))

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        self._found.steps += 1
        if self._fetched_s <= step.ended_s:  # later batches belong to the next step
            self._fetched = None
        if self._passes:
            self._record_evaluation()
        calls = step.calls
        if not calls or (len(calls) == 1 and calls[0].training is self._same):
            return
        self._same = calls[0].training
        training = {n for call in calls for n, on in enumerate(call.training) if on}
        gone = set(range(len(self._modules))) - training
        self._eval = {n: self._eval.get(n, step.step) for n in gone}
        self.urgent |= any(n in self._was_training and self._eval[n] == step.step for n in gone & {*self._depends})
        self._was_training |= training

    def _record_evaluation(self) -> None:
        """Records evaluations since the last step on other batches than the training batches."""
        modes, found = {mode: site for site, mode in self._passes if site in self._sites}, self._found
        self._passes = set()
        if True in modes:
            self.urgent |= not found.num_evaluated_in_train and self._steps > MIN_STEPS
            found.source = found.source or source_of(modes[True])
            found.num_evaluated_in_train += 1
            found.evaluated_in_train = (*found.evaluated_in_train, self._steps)[:MAX_EVALUATIONS]
        if False in modes:
            found.evaluated_in_eval = (*found.evaluated_in_eval, self._steps)[:MAX_EVALUATIONS]

    def facts(self) -> ModesFacts:
        self.urgent = False
        in_eval = {id(self._modules[n]) for n in self._eval}
        self._found.roots_in_eval = tuple(id(root) in in_eval for root in self._roots)
        self._found.eval = tuple(self._about(n) for n in sorted(self._eval)[:256])
        return self._found

    def _about(self, n: int) -> EvalModule:
        module, name = self._modules[n], self._names[n]
        by_name = dict(zip(self._names, self._modules))
        owner, path = module, name
        while not any(True for _ in owner.parameters()) and path:
            path = path.rpartition(".")[0]
            owner = by_name.get(path, owner)
        return EvalModule(
            module=name,
            since=self._eval[n],
            left=n in self._was_training,
            depends=n in self._depends,
            norm=isinstance(module, _NormBase),
            container=any(True for _ in module.children()),
            trained=any(p.requires_grad for p in owner.parameters()),
            source=self._lines.get(id(module)),
        )


def depends_on_mode(module: nn.Module) -> bool:
    """Returns True if the forward pass differs in eval mode. Custom classes are examined by their code."""
    if isinstance(module, _NormBase):
        return module.track_running_stats
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if type(module).__module__.startswith("torch.nn."):
        # the dropout submodules of nn.TransformerEncoderLayer count on their own
        rate = getattr(module, "dropout", 0.0)
        return isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0)
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    functions = [f for each in classes for name, f in vars(each).items() if name not in ("train", "eval")]
    return any("training" in f.__code__.co_names for f in functions if hasattr(f, "__code__"))


def drop_rate(name: str, args: Args, kwargs: Kwargs) -> float:
    """Returns the rate at which a function drops values although every module is in eval mode; else 0."""
    if name in DROPOUTS:
        is_on = argument(args, kwargs, 2, "training", kwargs.get("train", True))
        return float(argument(args, kwargs, 1, "p", 0.5)) if is_on else 0.0
    if name == "scaled_dot_product_attention":
        return float(argument(args, kwargs, 4, "dropout_p", 0.0))
    if name not in ("bernoulli", "bernoulli_"):
        return 0.0
    rates = argument(args, kwargs, 1, "p", 0.5 if name == "bernoulli_" else argument(args, kwargs, 0, "input", 0.5))
    is_mask = not isinstance(rates, Tensor) or bool((rates == rates.flatten()[:1]).all())
    return 0.5 if is_mask else 0.0  # with unequal rates, it samples a latent variable


@replay(DropsFacts, when="first", steps=0.5, value=2.0)
def in_eval_mode(session: ReplaySession) -> DropsFacts:
    """Returns functions inside the models that drop values although every module is in eval mode."""
    modules = ModuleStack(session.modules)
    found: dict[Drop, None] = {}

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name = function_name(function)
        if modules.innermost is not None and drop_rate(name, args, kwargs):
            found[Drop(modules.innermost, name)] = None
        return function(*args, **kwargs)

    session.run(Intervention(mode="eval", ops=collect, model=modules.following), upto="forward")
    return DropsFacts(tuple(found))
