"""Replays a watched step from its bundle, on the model that the user's function builds."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.commands.replay.change import StepChange
from trainwright.commands.replay.result import Compared, Rerun, Say, examine_replay
from trainwright.errors import UsageError, text_of
from trainwright.recorder.numbers import as_record
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ring import Ring
from trainwright.replay.bundle import Bundle, BundleError
from trainwright.replay.replayer import NotReplayable, Replayer, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.runs.records import Record
from trainwright.watching.budget import ExaminationBudget
from trainwright.watching.experiments import ExperimentRunner, names_of

UNBOUNDED = 2**62
"""Bytes. The content of a bundle was within the budget of the recorder that wrote it."""


def rerun_watched(bundle: Bundle, step: int, model: str | None, say: Say, change: StepChange | None = None) -> Rerun:
    """Replay the steps of the bundle up to ``step``, compare that step with its record, and diagnose it.

    With a ``change``, try it on the step and make no diagnosis.
    """
    done = Rerun(step, bundle.path)
    steps = [each.step for each in bundle.steps]
    if step not in steps:
        raise UsageError(
            f"{bundle.path} holds no step {step}", remedy=f"it holds the steps {steps[0]} to {bundle.step}"
        )
    if bundle.blind:
        done.blind = bundle.blind
        done.notes.append(f"the weights before it and its inputs are in {bundle.path}")
        return done
    if model is None:
        raise UsageError(
            f"only your code can build the model of {bundle.path} ({', '.join(bundle.structure.roots)})",
            remedy="add --model file.py:function, a function without arguments that returns the model, or "
            "(model, optimizer)",
        )
    subject = _built(model, bundle)
    snapshot, recorded_steps = bundle.bound(subject, names_of(subject))
    ring = Ring(keep=len(recorded_steps), budget_bytes=UNBOUNDED)
    ring.add_snapshot(snapshot)
    for each in recorded_steps:
        ring.add(each)
    say(f"replaying the steps {steps[0]} to {step}")
    recorded = recorded_steps[steps.index(step)]
    _notes_on(bundle, recorded, done)
    try:
        session = ReplaySession(Replayer(subject, names_of(subject)), ring, step)
        result = session.run(upto="step")
    except NotReplayable as error:
        done.blind = str(error)
        return done
    done.error = None if result.error is None else f"{type(result.error).__name__}: {result.error}"
    done.compared = list(compared(recorded, result, subject))
    if change is not None:
        done.changed = change.tried(session)
        return done
    known: list[Record] = [as_record(each) for each in recorded_steps if each.step <= step]
    examine_replay(done, ExperimentRunner(subject, ring, ExaminationBudget(bundle.device, "all")), known)
    return done


def _notes_on(bundle: Bundle, recorded: RecordedStep, done: Rerun) -> None:
    """Note what may change the bits: a graph that was not recorded, another torch, another device."""
    if recorded.values.get("grafted"):
        done.notes.append("a part of the loss has a graph that was not recorded: its gradients are not in the replay")
    if torch.__version__ != bundle.recorded_by:
        done.notes.append(f"it was recorded with torch {bundle.recorded_by}, and this is {torch.__version__}")
    if bundle.device.type != bundle.recorded_on:
        done.notes.append(f"it was recorded on {bundle.recorded_on}, and this is {bundle.device.type}")


def compared(recorded: RecordedStep, result: ReplayResult, subject: LiveObjects) -> Iterator[Compared]:
    """Compare the losses and the gradient norm: at clipping, or at the update if the loop does not clip."""
    yield Compared("losses", [float(each) for each in recorded.losses], [float(each) for each in result.losses])
    clips = [value for kind, value in recorded.events if kind == "clip" and value["by"] == "norm"]
    if clips and clips[-1]["norm"] is not None:
        yield Compared("gradient norm", float(clips[-1]["norm"]), result.norm_at_clip)
    elif recorded.grad_norm is not None and len(subject.optimizers) == 1:
        owned = [p for group in subject.optimizers[0].param_groups for p in group["params"]]
        name_of = {id(p): name for p, name in zip(subject.parameters, names_of(subject))}
        grads = [grad for p in owned if (grad := result.grads.get(name_of[id(p)])) is not None and not grad.is_sparse]
        yield Compared("gradient norm", float(recorded.grad_norm), float(get_total_norm(grads)) if grads else 0.0)


def _built(model: str, bundle: Bundle) -> LiveObjects:
    """Return the objects that the user's function builds, in the order of the bundle. Missing optimizers are made."""
    made = _call(model)
    pair = isinstance(made, tuple) and len(made) == 2 and not isinstance(made[1], nn.Module)
    roots = _several(made[0] if pair else made, nn.Module, model)
    optimizers = _several(made[1], Optimizer, model) if pair else []
    for root in roots:
        root.to(bundle.device)
    only = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    parameters = list({id(p): p for p in [*(p for root in roots for p in root.parameters()), *only]}.values())
    named = dict(zip(names_of(LiveObjects(roots, optimizers, parameters)), parameters))
    if named.keys() == set(bundle.structure.parameters):
        parameters = [named[name] for name in bundle.structure.parameters]
        for parameter, trained in zip(parameters, bundle.structure.trained):
            parameter.requires_grad_(trained)
        optimizers = optimizers or _make_optimizers(bundle, parameters)
    return LiveObjects(roots, optimizers, parameters)


def _make_optimizers(bundle: Bundle, parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
    """Make the optimizers of the bundle from their groups. Only classes of torch.optim are supported."""
    classes: list[Any] = [
        each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer)
    ]
    known = {f"{each.__module__}.{each.__qualname__}": each for each in classes if each is not Optimizer}
    made = []
    for (name, groups), kept in zip(bundle.structure.optimizers, bundle.snapshot.groups):
        if name not in known:
            raise BundleError(
                f"the optimizer was a {name}, which is not in torch.optim",
                remedy="let the function of --model return (model, optimizer)",
            )
        param_groups = [{**values, "params": [parameters[n] for n in group]} for group, values in zip(groups, kept)]
        made.append(known[name](param_groups))
    return made


def _several(made: Any, kind: type, model: str) -> list[Any]:
    """Return ``made`` as a list. Raises UsageError for an item that is not of ``kind``."""
    items = list(made) if isinstance(made, list | tuple) else [made]
    for item in items:
        if not isinstance(item, kind):
            raise UsageError(
                f"{model} returned a {type(item).__name__}", remedy="return a model, or (model, optimizer)"
            )
    return items


def _call(model: str) -> Any:
    """Import the file and return the result of its function. ``model`` is ``file.py:function``."""
    file, _, name = model.rpartition(":")
    path = Path(file)
    if not path.is_file() or not name:
        raise UsageError(f"--model {model} names no file", remedy="give file.py:function, such as train.py:build")
    beside = str(path.parent.absolute())
    sys.path.insert(0, beside)
    try:
        spec = importlib.util.spec_from_file_location(f"_replayed_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if not callable(function := getattr(module, name, None)):
            raise UsageError(f"{path} has no function {name!r}", remedy="give file.py:function")
        return function()
    except UsageError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"{model} raised {text_of(error)} at {frame.filename}:{frame.lineno}",
            remedy="it is called without arguments; guard training code with `if __name__ == '__main__':`",
        ) from None
    finally:
        sys.path.remove(beside)
